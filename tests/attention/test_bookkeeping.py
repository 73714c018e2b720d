"""Sections, findings, schedule and injection: what is decided and kept on the host."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from everstep.attention import explicit, fused, linear
from everstep.attention.evidence import Allowance, Sighting, Statement, Verdict, decode, encode, judge, shared
from everstep.attention.findings import Deviation, FindingLog, outcome
from everstep.attention.guard import Checks
from everstep.attention.injection import Fault, Injector, inject
from everstep.attention.masks import Visible
from everstep.attention.schedule import (
    GATHERED,
    HALF_LIFE_STEPS,
    PRIOR_ERRORS_PER_FLOP,
    Load,
    Schedule,
    allot,
    error_rate,
    uniform,
)
from everstep.attention.section import AttentionCheck, Inject


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"mode": "repair"}, "attention_check.mode"),
        ({"path": "flash"}, "attention_check.path"),
        ({"rerun": "often"}, "attention_check.rerun"),
        ({"frequency": 1.5}, "attention_check.frequency"),
        ({"max_overhead": 0.0}, "attention_check.max_overhead"),
        ({"frequency": -0.1}, "attention_check.frequency"),
        ({"frequency": "often"}, "attention_check.frequency"),
        ({"residual_risk": 0.0}, "attention_check.residual_risk"),
        ({"inject": Inject(kind="nan")}, "attention_check.allow_injection"),
    ],
)
def test_a_bad_value_is_named_with_its_key(values, key):
    with pytest.raises(ValueError, match=key):
        AttentionCheck(**values)


@pytest.mark.parametrize(("name", "value"), [("kind", "gamma"), ("every", 0), ("first_step", 0), ("bit", 99)])
def test_a_bad_injection_is_named_with_its_key(name, value):
    with pytest.raises(ValueError, match=rf"attention_check\.inject\.{name}"):
        Inject(**{name: value})


def record(log, *, refused=0, corrected=0, again=False, layer=2, section="scores", size=3.0):
    residual = torch.tensor([0.0, size])
    seen = Deviation(residual, torch.tensor(1.0), torch.tensor(100.0))
    log.record(layer, section, outcome(seen, refused=refused, corrected=corrected), again=again)


def test_a_finding_says_where_what_and_how_large():
    log = FindingLog(rank=5)
    log.begin(7, 2)
    record(log, corrected=1)
    assert not log.refused()
    assert log.drain() == [
        {
            "step": 7,
            "slot": 2,
            "layer": 2,
            "section": "scores",
            "rank": 5,
            "kind": "moderate",
            "magnitude": 3.0,
            "count": 1,
            "action": "corrected",
        }
    ]
    assert log.drain() == []


@pytest.mark.parametrize(
    ("size", "kind"), [(math.nan, "nan"), (-math.inf, "inf"), (1e30, "near-inf"), (2.0, "moderate")]
)
def test_a_finding_has_the_kind_of_its_worst_value(size, kind):
    log = FindingLog()
    log.begin(1, 0)
    record(log, refused=1, size=size)
    assert log.refused()
    (finding,) = log.drain()
    assert finding["kind"] == kind
    assert finding["magnitude"] is None or math.isfinite(finding["magnitude"])


def test_checkpointing_that_computes_again_is_not_a_second_finding():
    log = FindingLog()
    log.begin(1, 0)
    record(log, corrected=1)
    record(log, corrected=1, again=True)
    log.refused()
    assert [f["count"] for f in log.drain()] == [1]


def test_a_fault_of_the_second_pass_alone_is_a_finding():
    log = FindingLog()
    log.begin(1, 0)
    record(log, refused=1, again=True)
    assert log.refused()


def test_a_clean_slot_has_neither_finding_nor_refusal():
    log = FindingLog()
    log.begin(1, 0)
    record(log, size=0.5)
    assert not log.refused()
    assert log.drain() == []


def test_every_refusal_of_a_slot_is_kept_as_evidence_with_rank_and_host():
    log = FindingLog(rank=9)
    for count in range(2):
        assert len(log.refusals(1)) == count
        log.begin(4, 1)
        record(log, refused=1, layer=11)
        assert log.refused()
    assert log.refusals(1) == [(Sighting(11, "scores", "moderate", 3.0, 3.0, True),)] * 2
    assert "rank 9 on host" in log.describe(1)
    assert "slot 1 of step 4" in log.describe(1)
    assert "layer 11 scores" in log.describe(1)
    log.begin(4, 2)
    assert log.refusals(2) == [], "of another slot"
    assert not log.refused()
    assert log.seen(2) == [()]
    assert len(log.seen(1)) == 2
    log.begin(5, 2)
    assert log.seen(1) == [], "of another step"


def refuse_until_judged(bench, compute, section="", fault=None, **judging):
    """Compute one slot, with a fault in it or without, until its refusals are judged; the judgement."""
    for _ in range(5):
        bench.run(compute, section, fault)
        judged = bench.checks.judge(0, **judging)
        if judged.verdict is not Verdict.AGAIN:
            return judged
    raise AssertionError("never judged")


def projection(x, w):
    return lambda guard: linear.linear(x, w, None, guard, linear.WeightSums())


def test_a_rank_that_was_given_nan_does_not_name_itself_and_the_one_that_made_it_does(make_bench):
    """Two ranks of one layer: the first makes a NaN that only detection sees, the second gets it as its input."""
    maker, given = make_bench(mode="detect"), make_bench(mode="detect")
    x, w = torch.randn(8, 64), torch.randn(64, 64)
    fault = Fault("nan", 0.5)
    y, refused, _ = maker.run(projection(x, w), "wqkv.y", fault)
    assert refused
    judged = refuse_until_judged(maker, projection(x, w), "wqkv.y", fault, witnesses=[()])
    assert judged.verdict is Verdict.UNFIT
    assert "take it out of service" in judged.reason
    judged = refuse_until_judged(given, projection(y, w), witnesses=[()])
    assert judged.verdict is Verdict.NOT_FINITE
    assert "take it out of service" not in judged.reason


def narrow(monkeypatch, by=1e-3):
    """Every projection's bound is a part of what it should be: it is at fault on every rank."""
    whole = linear.row_deviation

    def too_narrow(*args):
        seen = whole(*args)
        return Deviation(seen.residual, seen.bound * by, seen.scale)

    monkeypatch.setattr(linear, "row_deviation", too_narrow)


@pytest.mark.parametrize("by", [1e-3, 0.0], ids=["narrow", "nothing"])
@pytest.mark.parametrize("asked", [True, False], ids=["another group", "alone"])
def test_a_bound_that_is_too_narrow_is_widened_and_sends_nobody_away(make_bench, monkeypatch, asked, by):
    narrow(monkeypatch, by)
    x, w = torch.randn(64, 512), torch.randn(512, 512)
    one, other = make_bench(), make_bench()
    other.run(projection(x, w))
    witnesses = [other.checks.statement([0]).seen[0]] if asked else []
    assert not asked or witnesses[0]
    judged = refuse_until_judged(one, projection(x, w), witnesses=witnesses, alone=not asked)
    assert judged.verdict is Verdict.BOUND
    assert not judged.leaves
    assert [s.section for s in judged.evidence] == ["wqkv.y"]
    _, refused, findings = one.run(projection(x, w))
    assert not refused
    assert not findings
    assert other.run(projection(x, w))[1], "widened on the rank that was judged alone"
    _, refused, _ = one.run(projection(x, w), "wqkv.y", Fault("nan", 0.5))
    assert not refused, "an extreme error is still seen and repaired"


def test_who_has_not_heard_that_a_bound_was_widened_is_not_named_for_it(make_bench, monkeypatch):
    """It comes back with the bounds that the others had before, refuses a slot twice, and they see nothing there."""
    narrow(monkeypatch)
    compute = projection(torch.randn(64, 512), torch.randn(512, 512))
    wide, returned = make_bench(), make_bench()
    refuse_until_judged(wide, compute, alone=True)
    for _ in range(2):
        assert returned.run(compute)[1]
    returned.checks.learn(Statement.decode(wide.checks.statement().encode()).allowed)
    assert returned.checks.judge(0, [()]).verdict is Verdict.AGAIN
    assert not returned.run(compute)[1]


def test_what_another_group_saw_widens_the_bounds_of_a_rank_that_saw_nothing(make_bench, monkeypatch):
    """All ranks of a column have the same bounds, whoever computed the slot."""
    narrow(monkeypatch)
    compute = projection(torch.randn(64, 512), torch.randn(512, 512))
    one, other, idle = make_bench(), make_bench(), make_bench()
    seen = []
    for bench in (one, other):
        bench.run(compute)
        seen += bench.checks.statement([0]).seen.values()
    assert idle.checks.judge(0, seen) == (Verdict.AGAIN, "", (), False)
    assert not idle.run(compute)[1]


def test_numbers_that_are_not_finite_on_two_groups_are_let_pass_in_this_slot_alone(make_bench):
    one, other = make_bench(mode="detect"), make_bench(mode="detect")
    x, w = torch.full((8, 64), math.nan), torch.randn(64, 64)
    for bench in (one, one, other):
        assert bench.run(projection(x, w))[1]
    judged = one.checks.judge(0, [other.checks.statement([0]).seen[0]])
    assert (judged.verdict, judged.leaves) == (Verdict.NOT_FINITE, False)
    _, refused, findings = one.run(projection(x, w))
    assert not refused
    assert [finding["action"] for finding in findings] == ["accepted"]
    one.checks.begin(1, 1)
    projection(x, w)(one.guard)
    assert one.checks.refused(), "another slot"
    one.checks.committed()
    assert one.run(projection(x, w))[1], "after the step"


def test_a_slot_in_doubt_is_looked_at_whole_whatever_the_rate(make_bench):
    bench = make_bench(mode="detect", frequency=1e-9)
    compute = projection(torch.full((8, 64), math.nan), torch.randn(64, 64))
    bench.run(compute)  # until its first step is over a section is checked
    bench.checks.committed()
    assert not bench.run(compute)[1]
    bench.checks.begin(1, 0, whole=True)
    compute(bench.guard)
    assert bench.checks.refused()


def test_an_error_that_only_one_rank_has_names_it(make_bench, monkeypatch):
    """Two groups computed the slot; what one refuses the other does not see."""
    bench = make_bench(mode="detect")
    compute = projection(torch.randn(64, 64), torch.randn(64, 64))
    bench.run(compute, "wqkv.y", Fault("scale", 0.5, magnitude=50))
    assert bench.checks.judge(0, alone=False).verdict is Verdict.AGAIN
    bench.run(compute, "wqkv.y", Fault("scale", 0.5, magnitude=50))
    assert bench.checks.judge(0).verdict is Verdict.WITNESS
    judged = bench.checks.judge(0, [()])
    assert (judged.verdict, judged.leaves) == (Verdict.UNFIT, True)


def test_what_a_bound_explains_in_one_place_does_not_excuse_another(make_bench):
    """One rank is wrong in a layer, and a bound of another layer is too narrow for all."""
    bench = make_bench()
    narrow_one, wrong = replace(SEEN, layer=1), replace(SEEN, layer=2)
    log = bench.checks.findings
    log.begin(1, 0)
    for _ in range(2):
        log._seen[0].append((narrow_one, wrong))
    judged = bench.checks.judge(0, [(narrow_one,)])
    assert (judged.verdict, judged.evidence) == (Verdict.BOUND, (narrow_one,))
    judged = bench.checks.judge(0, [()])
    assert (judged.verdict, judged.evidence) == (Verdict.UNFIT, (wrong,))


SEEN = Sighting(3, "wo.dx", "moderate", 4.0, 20.0, True)


@pytest.mark.parametrize(
    ("own", "judging", "verdict"),
    [
        ([(SEEN,)], {}, Verdict.AGAIN),
        ([(SEEN,)], {"witnessed": True}, Verdict.AGAIN),
        ([(SEEN,), ()], {"witnessed": True}, Verdict.AGAIN),
        ([(), (SEEN,)], {"witnessed": True}, Verdict.AGAIN),
        ([(SEEN,)] * 2, {}, Verdict.WITNESS),
        ([(SEEN,)] * 2, {"witnessed": True}, Verdict.UNFIT),
        ([(SEEN,)] * 2, {"witnessed": True, "alone": True}, Verdict.UNFIT),
        ([(SEEN,), (), (SEEN,)], {"witnessed": True}, Verdict.UNFIT),
        ([(replace(SEEN, ratio=1.9),)] * 2, {"witnessed": True}, Verdict.BOUND),
        ([(replace(SEEN, kind="nan"),)] * 2, {"witnessed": True}, Verdict.UNFIT),
        ([(replace(SEEN, kind="nan", own=False),)] * 2, {"witnessed": True}, Verdict.NOT_FINITE),
        ([(SEEN,)] * 2, {"alone": True}, Verdict.AGAIN),
        ([(SEEN,)] * 3, {"alone": True}, Verdict.BOUND),
        ([(SEEN,), (replace(SEEN, magnitude=1.0),), (SEEN,)], {"alone": True}, Verdict.UNFIT),
        ([(replace(SEEN, kind="inf"),)] * 3, {"alone": True}, Verdict.NOT_FINITE),
    ],
)
def test_whose_fault_it_is(own, judging, verdict):
    assert judge(own, **judging) is verdict


def test_what_ranks_share_is_the_same_residual_in_the_same_place():
    close, far = replace(SEEN, magnitude=4.01, ratio=20.05), replace(SEEN, magnitude=4.2, ratio=21.0)
    assert shared([(SEEN,), (close,)]) == shared([(close,), (), (SEEN,)]) == (SEEN,)
    assert shared([(SEEN,), (far,)]) == ()
    assert shared([(SEEN,), (far,)], math.inf) == (SEEN,)
    assert shared([(SEEN,), (replace(SEEN, section="wo.dw"),)], math.inf) == ()
    assert shared([(SEEN,), (replace(SEEN, kind="nan"),)], math.inf) == ()
    other = replace(SEEN, layer=1)
    assert shared([(SEEN, other), (replace(other, magnitude=9.0), close)]) == (SEEN,)


def test_evidence_travels_as_plain_values():
    evidence = (SEEN, replace(SEEN, kind="nan", own=False))
    assert decode(json.loads(json.dumps(encode(evidence)))) == evidence
    for broken in (
        [{"layer": 1}],
        [{**asdict(SEEN), "layer": "1"}],
        ["x"],
        [{**asdict(SEEN), "more": 1}],
        [{**asdict(SEEN), "ratio": math.inf}],
        [{**asdict(SEEN), "own": 1}],
    ):
        with pytest.raises(ValueError, match="evidence"):
            decode(broken)


def test_statement_travels_as_bytes_and_nothing_else_is_taken_for_it():
    statement = Statement({3: (SEEN,), 5: ()}, {(3, "wo.dx"): Allowance(40.0), (4, "y"): Allowance(floor=1.5)})
    assert Statement.decode(statement.encode()) == statement
    for broken in (
        b"",
        b"\xff",
        b"7",
        b"[1, 2]",
        b"[[], []]",
        b"[{}, [1]]",
        b'[{"x": []}, []]',
        b'[{"1": 7}, []]',
        b'[{}, [["3", "y", 1.0, 0.0]]]',
        b'[{}, [[3, "y", NaN, 0.0]]]',
        b'[{}, [[3, "y", 1.0]]]',
        b'[{}, [[[3], "y", 1.0, 0.0]]]',
        b"[" * 100_000,
    ):
        with pytest.raises(ValueError):  # noqa: PT011 as json's own are
            Statement.decode(broken)


def test_a_fault_under_checkpointing_is_found_once(bench):
    x = torch.randn(8, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    sums = linear.WeightSums()

    def compute(guard):
        y = checkpoint(lambda x: linear.linear(x, w, None, guard, sums).relu(), x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), (x, w))

    got, refused, findings = bench.run(compute, "wqkv.y", Fault("nan", 0.5))
    assert not refused
    assert [f["section"] for f in findings] == ["wqkv.y"]
    clean, _, _ = bench.run(compute)
    for a, b in zip(got, clean, strict=True):
        torch.testing.assert_close(a, b)


LOADS = st.lists(st.builds(Load, st.floats(1e6, 1e15), st.floats(1.0, 1e9), st.floats(0.01, 1)), min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(LOADS, st.floats(0.001, 1.5))
def test_allotted_rates_meet_the_risk_and_no_rate_could_be_lower(loads, share):
    rate = 2e-25
    whole = sum(rate * load.flops * load.vulnerability for load in loads)
    rates = allot(loads, rate, share * whole)
    unseen = sum((1 - f) * rate * load.flops * load.vulnerability for f, load in zip(rates, loads, strict=True))
    assert unseen <= share * whole * (1 + 1e-9) + 1e-300
    assert all(0 <= f <= 1 + 1e-12 for f in rates)
    assert sum(1e-9 < f < 1 - 1e-9 for f in rates) <= 1, "a knapsack has one broken piece"
    value = [load.flops * load.vulnerability / load.cost for load in loads]
    taken = [v for v, f in zip(value, rates, strict=True) if f > 1e-9]
    left = [v for v, f in zip(value, rates, strict=True) if f <= 1e-9]
    assert not taken or not left or min(taken) >= max(left) * (1 - 1e-9)


@settings(max_examples=200, deadline=None)
@given(LOADS, st.floats(0.001, 1.5), st.floats(0.001, 1.5))
def test_rates_never_cost_more_than_the_budget_and_buy_the_most_with_it(loads, share, bought):
    whole = sum(2e-25 * load.flops * load.vulnerability for load in loads)
    cost = sum(load.cost for load in loads)
    rates = allot(loads, 2e-25, share * whole, 1 / 64, bought * cost)
    assert sum(f * load.cost for f, load in zip(rates, loads, strict=True)) <= bought * cost * (1 + 1e-9)
    free = allot(loads, 2e-25, share * whole, 1 / 64)
    if sum(f * load.cost for f, load in zip(free, loads, strict=True)) <= bought * cost * (1 - 1e-9):
        assert rates == pytest.approx(free)
    else:
        spent = sum(f * load.cost for f, load in zip(rates, loads, strict=True))
        assert spent == pytest.approx(bought * cost, rel=1e-6)


def scheduled(flops, check_s, slot_s=1.0, sections=10):
    """The plan after some steps of four slots, in which a check of each of ten sections takes `check_s`."""
    schedule = Schedule(None, residual_risk=1e-5, max_overhead=0.02)
    for step in range(1, 8):
        for slot in range(4):
            schedule.begin(step, slot)
            for section in range(sections):
                if schedule.checking(section, "wo.y", flops=flops, cost=1e6):
                    schedule.took(section, "wo.y", check_s)
            schedule.slot_took(slot_s)
        schedule.committed()
    return schedule


def test_what_real_models_would_cost_stays_below_the_ceiling_and_the_risk_that_leaves_is_told():
    """10 checks of 40 ms in slots of a second would be 40 %, and FLOPs enough to want all of them."""
    schedule = scheduled(flops=1e16, check_s=0.04)
    assert schedule.plan.overhead == pytest.approx(0.02)
    assert schedule.plan.residual_risk > 1e-5
    assert 0.04 < sum(schedule.rate(i, "wo.y") for i in range(10)) / 10 < 0.06


def test_cheap_checks_meet_the_risk_below_the_ceiling():
    schedule = scheduled(flops=1e16, check_s=1e-6)
    assert schedule.plan.overhead < 0.02
    assert schedule.plan.residual_risk <= 1.01e-5


def test_even_the_least_rates_keep_below_the_ceiling():
    schedule = scheduled(flops=1.0, check_s=1.0)
    assert schedule.plan.overhead == pytest.approx(0.02)
    assert schedule.rate(0, "wo.y") == pytest.approx(0.002 / 1.02)


def test_a_plan_is_news_once():
    checks = Checks(AttentionCheck(enable=True))
    assert checks.news() is None
    checks.schedule = scheduled(1e16, 0.04)
    assert checks.news()["overhead"] == pytest.approx(0.02)
    assert checks.news() is None
    checks.schedule = scheduled(1e13, 1e-6)
    assert checks.news() is not None


def test_the_first_own_error_outweighs_the_prior():
    assert error_rate(0, 0) == pytest.approx(PRIOR_ERRORS_PER_FLOP)
    assert error_rate(1, 0) == pytest.approx(3 * PRIOR_ERRORS_PER_FLOP)
    assert error_rate(0, 1e30) < PRIOR_ERRORS_PER_FLOP / 1e4


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 1.0), (0.0, 0.0)])
def test_rates_one_and_zero_are_exact(rate, expected):
    schedule = Schedule(rate)
    for slot in range(200):
        schedule.begin(1, slot)
        assert schedule.checking(0, "s", flops=1e9, cost=1) is bool(expected)


def test_a_fixed_rate_checks_that_share_of_calls_and_the_same_ones_again():
    def decisions():
        schedule = Schedule(0.25, seed=3)
        chosen = []
        for step in range(1, 2001):
            schedule.begin(step, 0)
            chosen.append(schedule.checking(0, "s", flops=1e9, cost=1))
        return chosen

    assert 430 < sum(decisions()) < 570
    assert decisions() == decisions()


def test_sections_are_drawn_as_often_as_their_rates_say_and_slots_differ_by_one_check_at_most():
    schedule = Schedule(None)
    names = [(layer, name) for layer in range(6) for name in ("wo.y", "wo.dx", "attention.forward")]
    schedule.begin(1, 0)
    assert all(schedule.checking(*name, flops=1e9, cost=1.0) for name in names), "until their first step is over"
    schedule.committed()
    rates = {name: (place % 5 + 1) / 12 for place, name in enumerate(names)}
    for name, rate in rates.items():
        schedule._sections[name].rate = rate
    drawn = dict.fromkeys(names, 0)
    for slot in range(4000):
        schedule.begin(2, slot)
        checked = [name for name in names if schedule.checking(*name, flops=1e9, cost=1.0)]
        assert int(sum(rates.values())) <= len(checked) <= int(sum(rates.values())) + 1
        assert all(schedule.idle(layer) == (layer not in {of for of, _ in checked}) for layer in range(6))
        for name in checked:
            drawn[name] += 1
    assert {name: count / 4000 for name, count in drawn.items()} == pytest.approx(rates, abs=0.03)


def test_low_rates_are_gathered_into_one_step_of_some():
    """Each section is checked as often as its rate says, in steps that are the same on all ranks."""
    names = [(layer, name) for layer in range(6) for name in ("wo.y", "wo.dx", "attention.forward")]
    rates = {name: (place % 5 + 1) / (5 * GATHERED) for place, name in enumerate(names)}
    found = []
    for rank in range(2):
        schedule = Schedule(None, seed=rank)
        assert schedule.looks(1, 0), "nothing is known before the first step"
        schedule.begin(1, 0)
        for name in names:
            schedule.checking(*name, flops=1e9, cost=1.0)
        schedule.committed()
        for name, rate in rates.items():
            schedule._sections[name].rate = rate
        drawn, looked = dict.fromkeys(names, 0), set()
        for step in range(2, 1002):
            for slot in range(2):
                looks = schedule.looks(step, slot)
                schedule.begin(step, slot)
                checked = [name for name in names if schedule.checking(*name, flops=1e9, cost=1.0)]
                assert schedule.crowded is looks
                assert looks or (not checked and all(schedule.idle(layer) for layer in range(6)))
                assert not schedule.checking(99, f"new {step}", flops=1.0, cost=1.0) or looks
                del schedule._sections[99, f"new {step}"]
                schedule._line = None
                looked |= {step} if looks else set()
                for name in checked:
                    drawn[name] += 1
        assert looked == set(range(GATHERED, 1001, GATHERED))
        assert {name: count / 2000 for name, count in drawn.items()} == pytest.approx(rates, abs=0.02)
        found.append(drawn)
    assert found[0] != found[1], "ranks draw for themselves"
    schedule.found(3)
    assert all(schedule.looks(step, 0) for step in range(1001, 1200)), "after a finding every step is looked at"
    assert not all(schedule.looks(step, 0) for step in range(1401, 1420))


def test_a_rank_that_has_nothing_to_check_makes_its_group_look_at_no_further_step():
    """Such as a pipeline's stage without attention: a slot is looked at on all ranks of a group or on none."""
    schedule = Schedule(None)
    schedule.committed()
    assert schedule.looks(2, 0), "it has computed nothing yet"
    schedule.begin(2, 0)
    schedule.committed()
    assert [step for step in range(3, 100) if schedule.looks(step, 0)] == list(range(GATHERED, 100, GATHERED))
    schedule.begin(3, 0)
    assert not schedule.checking(0, "wo.y", flops=1.0, cost=1.0)
    assert schedule.looks(3, 1), "it has something to check after all"


def test_a_share_of_calls_is_looked_at_in_every_step():
    assert all(Schedule(0.01).looks(step, 0) for step in range(20))
    assert not any(Schedule(0.0).looks(step, 0) for step in range(20))


def test_a_layer_that_is_idle_has_the_load_of_the_slot_in_which_it_was_not():
    schedule = Schedule(None, residual_risk=0.5 * 2e-25 * 8 * 1e17 * 1e6)
    for step in range(1, 20):
        for slot in range(4):
            schedule.begin(step, slot)
            for layer in range(2):
                if not schedule.idle(layer):
                    schedule.checking(layer, "s", flops=1e17, cost=1.0)
        schedule.committed()
        assert sum(schedule.rate(layer, "s") for layer in range(2)) == pytest.approx(1.0, abs=0.02)


def test_nothing_of_the_checks_runs_where_a_layer_is_idle(make_bench):
    bench = make_bench(frequency=1e-9)
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    bench.checks.injector = Injector(Inject())
    for node in ("_LinearBackward", "MmBackward0"):  # seen first in one slot, idle in the next
        bench.checks.begin(1, 0)
        assert projection(x, w)(bench.guard).grad_fn.name() == node
    bench.checks.begin(1, 0, whole=True)
    assert projection(x, w)(bench.guard).grad_fn.name() == "_LinearBackward"


def test_what_a_check_takes_is_what_the_last_ones_took():
    """The first ones of a step find sums of weights made by others; where few calls are checked each makes its own."""
    schedule = Schedule(None, max_overhead=0.02)
    schedule.begin(1, 0)
    schedule.checking(0, "wo.y", flops=1e16, cost=1.0)
    for slot, took in enumerate((*[1e-4] * 12, *[6e-4] * 8, 1e-4)):
        schedule.begin(1, slot)
        schedule.took(0, "wo.y", took / 2)  # two calls, or two parts of one
        schedule.took(0, "wo.y", took / 2)
        schedule.slot_took(0.01)
    schedule.committed()
    assert schedule.plan.overhead == pytest.approx(0.02)
    assert schedule.rate(0, "wo.y") == pytest.approx(0.02 / 1.02 * 0.01 / 6e-4)


@pytest.mark.parametrize("ceiling", [0.1, 0.5])
def test_the_ceiling_is_a_share_of_what_slots_take_without_their_checks(ceiling):
    """A slot of a second, in which as many checks as are made add 0.1 s each."""
    schedule, spent = Schedule(None, max_overhead=ceiling), []
    for step in range(1, 200):
        for slot in range(2):
            schedule.begin(step, slot)
            checked = [layer for layer in range(20) if not schedule.idle(layer)]
            took = 0.1 * sum(schedule.checking(layer, "wo.y", flops=1e17, cost=1.0) for layer in checked)
            for layer in checked if took else ():
                schedule.took(layer, "wo.y", 0.1)
            schedule.slot_took(1.0 + took, crowded=schedule.crowded)
            spent.append(took)
        schedule.committed()
    assert 0.9 * ceiling < sum(spent[40:]) / len(spent[40:]) < 1.05 * ceiling


@pytest.mark.parametrize("path", ["explicit", "fused"])
def test_all_that_checks_of_a_section_take_in_a_slot_counts(make_bench, monkeypatch, path):
    """Both passes of a checkpointed forward, and each product of attention as matrices."""
    bench, spent = make_bench(frequency="adaptive", path=path), {}
    schedule, q = bench.checks.schedule, torch.randn(1, 300, 2, 16, requires_grad=True)
    w, sums, seen = torch.randn(16, 16, requires_grad=True), linear.WeightSums(), Visible(causal=True)
    took = schedule.took

    def note(layer, section, seconds):
        spent.setdefault(section, {}).setdefault(slot, []).append(seconds)
        took(layer, section, seconds)

    def attend(q, k, v, guard=None):
        return explicit.attention(q, k, v, seen, guard=guard)[0], None

    def block(q):
        x = linear.linear(q, w, None, bench.guard, sums)
        if path == "explicit":
            return attend(x, x, x, bench.guard)[0]
        return fused.attention(attend, x, x, x, scale=None, guard=bench.guard)[0]

    monkeypatch.setattr(schedule, "took", note)
    for slot in range(3):
        bench.checks.begin(1, slot)
        checkpoint(block, q, use_reentrant=False).sum().backward()
        assert not bench.checks.refused()
    bench.checks.committed()
    per_slot = {section: [sum(all_of) for all_of in by_slot.values()] for section, by_slot in spent.items()}
    forward = "attention.rerun" if path == "fused" else "attention.forward"
    assert {"wqkv.y", "wqkv.dx", "wqkv.dw", forward, "attention.backward"} == set(per_slot)
    assert all(len(all_of) > 1 for all_of in spent["wqkv.y"].values()), "checkpointing ran it once"
    for section, slots in per_slot.items():
        assert schedule._sections[3, section].seconds == pytest.approx(sorted(slots)[1])


def adaptive(flops):
    schedule = Schedule(None, residual_risk=1e-5)
    for step in (1, 2):
        schedule.begin(step, 0)
        for layer in (0, 1):
            schedule.checking(layer, "s", flops=flops, cost=1e6)
        schedule.committed()
    return schedule


def test_adaptive_rates_follow_the_load():
    assert adaptive(1e9).rate(0, "s") == pytest.approx(1 / 64)
    assert adaptive(1e17).rate(0, "s") == 1.0


def test_where_less_ruins_training_less_is_checked():
    """Two sections alike but for their vulnerability: the risk is met by checking the worse one."""
    schedule = Schedule(None, residual_risk=0.6 * 2e-25 * 1e17 * 1e6)
    for step in (1, 2):
        schedule.begin(step, 0)
        for section in ("attention.rerun", "wo.dx"):
            schedule.checking(0, section, flops=1e17, cost=1e6)
        schedule.committed()
    assert schedule.rate(0, "wo.dx") > schedule.rate(0, "attention.rerun")


def test_a_finding_raises_its_layer_at_once_and_the_raise_decays():
    schedule = adaptive(1e9)
    schedule.begin(3, 0)
    schedule.found(1)
    assert schedule.rate(1, "s") == 1.0
    assert schedule.rate(0, "s") < 0.1
    schedule.begin(3 + HALF_LIFE_STEPS, 0)
    assert schedule.rate(1, "s") == pytest.approx(0.5)


def test_weights_have_a_new_version_after_a_commit_and_a_heal():
    schedule = Schedule(1.0)
    versions = [schedule.weights_version]
    schedule.committed()
    versions.append(schedule.weights_version)
    schedule.weights_changed()
    versions.append(schedule.weights_version)
    assert len(set(versions)) == 3


def test_numbers_are_uniform_and_depend_on_every_part_of_their_key():
    numbers = [uniform(0, step, slot, 1) for step in range(50) for slot in range(50)]
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert len(set(numbers)) == 2500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["bitflip", "inf", "nan", "near-inf", "scale"])
def test_an_element_fault_changes_one_element(dtype, kind):
    x = torch.randn(4, 32, 32).to(dtype)
    hit = inject(x, Fault(kind, 0.37, bit=5, magnitude=7))
    changed = ((hit != x) | hit.isnan()).nonzero()
    assert len(changed) == 1
    if kind == "near-inf":
        assert hit.isfinite().all()
        assert hit.abs().max() > 0.8 * torch.finfo(dtype).max


def test_every_bit_flips_and_flips_back():
    x = torch.randn(8)
    for bit in range(32):
        fault = Fault("bitflip", 0.5, bit=bit)
        once = inject(x, fault)
        assert not torch.equal(once.view(torch.int32), x.view(torch.int32))
        assert torch.equal(inject(once, fault).view(torch.int32), x.view(torch.int32))


def test_row_and_tile_faults_keep_to_their_shape():
    x = torch.ones(2, 40, 48)
    row = (inject(x, Fault("row", 0.3)) != 1).nonzero()
    assert len(row) == 48
    tile = (inject(x, Fault("tile", 0.3)) != 1).nonzero()
    assert len(tile) == 256
    assert (tile[:, 1:].amin(0) % 16 == 0).all()


def test_injection_hits_its_steps_once_and_the_same_way_again():
    def hits():
        injector = Injector(Inject(kind="nan", first_step=3, every=2, count=3, seed=4))
        for layer in range(4):
            injector.register(layer, ("a", "b"))
        for step in range(1, 12):
            for _slot in range(2):
                injector.begin(step)
                for layer in range(4):
                    injector.strike(layer, "a")
                    injector.strike(layer, "b")
        return injector.hits

    assert [step for step, _, _ in hits()] == [3, 5, 7]
    assert hits() == hits()


def test_injection_keeps_to_its_layer_section_and_rank():
    plan = Inject(kind="nan", layer=2, section="*.dw", rank=1)
    for rank, expected in ((0, 0), (1, 1)):
        injector = Injector(plan, rank)
        for layer in range(4):
            injector.register(layer, ("wo.y", "wo.dw"))
        injector.begin(1)
        for layer in range(4):
            for section in ("wo.y", "wo.dw"):
                injector.strike(layer, section)
        assert injector.hits == [(1, 2, "wo.dw")] * expected
