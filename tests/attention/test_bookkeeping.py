"""Sections, findings, schedule and injection: what is decided and kept on the host."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from everstep.attention import linear
from everstep.attention.findings import Deviation, FindingLog, Record
from everstep.attention.guard import Checks
from everstep.attention.injection import Fault, Injector, inject
from everstep.attention.schedule import HALF_LIFE_STEPS, Schedule, drawn, uniform
from everstep.attention.section import AttentionCheck, Inject


@pytest.mark.parametrize(
    ("make", "values", "key"),
    [
        (AttentionCheck, {"frequency": 1.5}, "frequency"),
        (AttentionCheck, {"frequency": -0.1}, "frequency"),
        (AttentionCheck, {"frequency": "often"}, "frequency"),
        (AttentionCheck, {"max_overhead": 0.0}, "max_overhead"),
        (Inject, {"every": 0}, r"inject\.every"),
        (Inject, {"first_step": 0}, r"inject\.first_step"),
    ],
)
def test_a_bad_value_is_named_with_its_key(make, values, key):
    with pytest.raises(ValueError, match=rf"attention_check\.{key}"):
        make(**values)


def record(log, size, action="refused", *, again=False):
    worst = Deviation(torch.tensor([0.0, size]), torch.tensor(2.0)).worst()
    log.record(Record(7, 2, 2, "scores", action, again, worst))


def found(*sizes, **given):
    log = FindingLog(rank=5)
    for size in sizes:
        record(log, size, **given)
    return log.refused(), log.drain()


def test_a_finding_says_where_what_and_how_large_and_what_is_within_its_bound_is_none():
    assert found(2.0, -1.5, 0.0) == (frozenset(), [])
    refused, findings = found(6.0, action="corrected")
    assert not refused
    place = {"step": 7, "slot": 2, "layer": 2, "section": "scores", "rank": 5}
    assert findings == [place | {"kind": "moderate", "magnitude": 3.0, "action": "corrected"}]


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [([math.nan], "nan"), ([-math.inf], "inf"), ([1e30], "moderate"), ([math.inf, math.nan], "nan")],
)
def test_a_finding_has_the_kind_of_its_worst_value(sizes, kind):
    refused, (finding,) = found(*sizes)
    assert refused
    assert finding["kind"] == kind


def test_slots_are_told_apart_and_what_nobody_uses_is_forgotten():
    log = FindingLog()
    for slot, size in enumerate((0.5, 3.0, math.nan)):
        log.record(Record(1, slot, 0, "wo.y", "refused", False, torch.tensor(size)))
    assert log.refused() == {1, 2}
    log.record(Record(1, 3, 0, "wo.y", "refused", False, torch.tensor(9.0)))
    log.forget()
    assert log.refused() == frozenset()


@pytest.mark.parametrize(
    ("value", "extreme"), [(3.0, False), (1e9, False), (-1e11, True), (math.inf, True), (math.nan, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_extreme_result_of_a_projection_refuses_its_slot_at_any_rate(make_bench, value, extreme, dtype):
    """Also where nothing else is checked, and the projection runs as if it had no guard."""
    bench = make_bench(frequency=0.0)
    bench.checks.injector = Injector(Inject())
    w = torch.eye(64, dtype=dtype)
    x = torch.zeros(8, 64, dtype=dtype)
    x[3, 5] = value
    bench.checks.begin(4, 2)
    linear.linear(x, w, None, bench.guard, linear.WeightSums())
    assert bench.checks.refused() == ({2} if extreme else set())


def test_checkpointing_that_computes_again_is_no_second_finding_and_a_fault_of_its_own_is_one():
    log = FindingLog()
    record(log, 6.0, "corrected")
    record(log, 9.0, again=True)
    assert not log.refused()
    assert [f["magnitude"] for f in log.drain()] == [3.0]
    record(log, 9.0, again=True)
    assert log.refused()


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


def checked(rates, draws=4000):
    return [drawn(rates, uniform(0, 1, slot)) for slot in range(draws)]


def test_layers_are_drawn_as_often_as_their_rates_say_and_slots_differ_by_one_layer_at_most():
    rates = {0: 0.1, 1: 0.75, 2: 1.0, 3: 0.02, 4: 0.4}
    slots = checked(rates)
    for layer, rate in rates.items():
        assert sum(layer in slot for slot in slots) / len(slots) == pytest.approx(rate, abs=0.02)
    assert {len(slot) for slot in slots} <= {2, 3}
    assert set(checked(dict.fromkeys(range(3), 1.0), 50)) == {frozenset(range(3))}
    assert set(checked(dict.fromkeys(range(3), 0.0), 50)) == {frozenset()}


def trained(schedule, layers, slots, took_s=0.1):
    """Seconds that checks take in slots of a second without them."""
    for layer in range(layers):
        schedule.add(layer)
    spent = []
    for slot in range(slots):
        schedule.begin(slot // 2 + 1, slot % 2)
        spent.append(took_s * len(schedule.checked))
        schedule.slot_took(1.0 + spent[-1], spent[-1], len(schedule.checked))
    return spent


@pytest.mark.parametrize("ceiling", [0.01, 0.1, 0.5])
def test_an_adaptive_rate_takes_what_it_may_of_the_time_without_checks(ceiling):
    schedule = Schedule(None, ceiling)
    spent = trained(schedule, 20, 600)[40:]
    assert sum(spent) / len(spent) == pytest.approx(ceiling, rel=0.15)
    assert schedule.plan.overhead == pytest.approx(ceiling)


def test_cheap_checks_are_all_made_and_dear_ones_now_and_then():
    assert min(trained(Schedule(None, 0.02), 4, 100, took_s=1e-3)) == pytest.approx(4e-3)
    assert sum(trained(Schedule(None, 0.02), 4, 2000, took_s=50.0)[40:]) > 0


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 3), (0.0, 0)])
def test_rates_one_and_zero_are_exact_and_a_slot_in_doubt_is_looked_at_whole(rate, expected):
    schedule = Schedule(rate)
    trained(schedule, 3, 0)
    for slot in range(20):
        schedule.begin(1, slot)
        assert len(schedule.checked) == expected
    schedule.begin(1, 0, whole=True)
    assert len(schedule.checked) == 3


def test_a_finding_raises_its_layer_at_once_and_the_raise_decays():
    schedule = Schedule(None, 0.01)
    trained(schedule, 20, 100)
    usual = schedule.rate(3, 1)
    schedule.found(3, 50)
    assert schedule.rate(3, 50) == 1.0
    assert schedule.rate(3, 50 + HALF_LIFE_STEPS) == 0.5
    assert schedule.rate(3, 50 + 20 * HALF_LIFE_STEPS) == usual == schedule.rate(4, 50)


def test_what_checks_take_is_told_once_and_again_when_it_has_changed():
    settings = AttentionCheck(enable=True)
    checks = Checks(settings)
    assert checks.news() is None
    trained(checks.schedule, 20, 100)
    most = settings.max_overhead
    assert checks.news() == {"overhead": pytest.approx(most), "rate": pytest.approx(most / 2)}
    assert checks.news() is None
    trained(checks.schedule, 20, 100, took_s=0.3)
    assert checks.news()["rate"] < 0.004
    assert Checks(AttentionCheck(enable=True, frequency=0.5)).news() == {"rate": 0.5}


def test_nothing_of_the_checks_runs_where_a_layer_is_idle(make_bench):
    bench = make_bench(frequency=0.0)
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    bench.checks.injector = Injector(Inject())
    for whole, node in ((False, "MmBackward0"), (True, "_LinearBackward")):
        bench.checks.begin(1, 0, whole=whole)
        assert linear.linear(x, w, None, bench.guard, linear.WeightSums()).grad_fn.name() == node


def test_row_and_tile_faults_keep_to_their_shape():
    x = torch.ones(2, 40, 48)
    row = (inject(x, Fault("row", 0.3)) != 1).nonzero()
    assert len(row) == 48
    tile = (inject(x, Fault("tile", 0.3)) != 1).nonzero()
    assert len(tile) == 256
    assert (tile[:, 1:].amin(0) % 16 == 0).all()


def test_injection_hits_its_steps_once_and_the_same_way_again():
    def hits():
        injector = Injector(Inject(kind="nan", first_step=3, every=4, seed=4))
        for layer in range(4):
            injector.register(layer, ("a", "b"))
        for step in range(1, 12):
            for _slot in range(2):
                injector.begin(step)
                for layer in range(4):
                    injector.strike(layer, "a")
                    injector.strike(layer, "b")
        return injector.hits

    assert [step for step, _, _ in hits()] == [3, 7, 11]
    assert hits() == hits()
