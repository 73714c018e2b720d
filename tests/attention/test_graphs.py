"""Checks in recorded graphs: torchtitan's wrapper, and an imitation of what it records with (`replayed`)."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.cudagraph import wrap_with_cuda_graph

from attention.test_override import MODELS, L, build, first, plain_sdpa, trainer_config
from everstep.attention.guard import Guard
from everstep.attention.injection import Fault, StandingFault, inject
from everstep.attention.schedule import SLOTS_MEASURED, SlotSchedule
from everstep.attention.section import AttentionCheck, Inject
from everstep.titan import attention as override
from replayed import Graph, Operations, graphs, memory, tensors

KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu"


class Run:
    """Two layers of the Llama 3 debug model in a trainer's place, slot by slot.

    Args:
        how: `graphs`, as torchtitan's trainer with CUDA graphs; `python`, the same checks without graphs; `eager`,
            checks as they are without; `stock`, none.
    """

    def __init__(self, how: str, backend: str | None = None, checkpointing=None, **section) -> None:
        spec = first(2, plain_sdpa(MODELS["llama3"]()))
        checked = AttentionCheck(enable=True, **{"frequency": 1.0, "path": "fused", **section})
        self.model, self.checks = build(
            spec, None if how == "stock" else checked, checkpointing, recorded=how in ("graphs", "python")
        )
        if backend:
            for block in self.model.layers.values():
                block.compile(backend=backend, fullgraph=True)
        self.vocabulary, self.touched = spec.model.vocab_size, []
        self.fwd_bwd_fn, self.config = (
            self._forward_backward_body,
            SimpleNamespace(fault_tolerance=SimpleNamespace(enable=True)),
        )
        if how == "graphs":
            self.fwd_bwd_fn = wrap_with_cuda_graph(self._forward_backward_body)
            override.record_both(self, self.checks)

    def _forward_backward_body(self, tokens, labels, count, extra):
        logits = self.model(tokens, **extra)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
        loss.backward()
        return loss

    def slot(self, step, slot, *, whole=True, hits=None):
        """Loss, gradients, whether it is refused and its findings; refused gradients are taken back."""
        draw = torch.Generator().manual_seed(100 * step + slot)
        tokens, labels = torch.randint(0, self.vocabulary, (2, 2, L), generator=draw)
        before = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        args = tokens, labels, torch.tensor(float(labels.numel())), {"positions": torch.arange(L).expand(2, -1).clone()}
        if self.checks is None:
            return self.fwd_bwd_fn(*args).detach().clone(), self.gradients()
        self.checks.begin(step, slot, whole=whole)
        if self.fwd_bwd_fn == self._forward_backward_body:
            with Operations(hits):
                loss = self.fwd_bwd_fn(*args)
        else:
            for graph in Graph.recorded:
                graph.hits = hits or {}
            loss = self.fwd_bwd_fn(*args)
        got = loss.detach().clone(), self.gradients(), self.checks.refused(), self.checks.drain()
        for parameter, gradient in zip(self.model.parameters(), before, strict=True):
            if got[2] and parameter.grad is not None:
                parameter.grad.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
        return got

    def gradients(self):
        return [p.grad.clone() for p in self.model.parameters()]

    @torch.no_grad()
    def commit(self):
        for parameter in self.model.parameters():
            parameter -= 0.3 * parameter.grad
            parameter.grad.zero_()
        if self.checks is not None:
            self.checks.committed()


def equal(a, b) -> bool:
    """Whether two slots went the same way, to the bit."""
    pairs = zip([a[0], *a[1]], [b[0], *b[1]], strict=True)
    return a[2:] == b[2:] and all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in pairs)


@pytest.fixture
def touched(monkeypatch):
    """Results as the checks get them, by layer and name."""
    seen, touch = {}, Guard.touch

    def noted(guard, section, result, **known):
        seen.setdefault((guard.layer, section), []).append(result)
        return touch(guard, section, result, **known)

    monkeypatch.setattr(Guard, "touch", noted)
    return seen


@pytest.fixture(autouse=True)
def _recording(monkeypatch):
    torch._dynamo.reset()
    with graphs(monkeypatch):
        yield


def place_of(graph, results) -> int:
    """Where in a graph one of these results is made."""
    made = {memory(x) for x in results}
    return next(i for i, (*_, out) in enumerate(graph.noted) if any(memory(x) in made for x in tensors(out)))


def kernel_at(graph, name, nth=0) -> int:
    return [i for i, (func, *_) in enumerate(graph.noted) if str(func) == f"{KERNEL}{name}.default"][nth]


def wrong(value=torch.nan, output=0):
    """Puts a value into an operation's result."""

    def hit(out):
        x = list(tensors(out))[output]
        x[(*(size // 2 for size in x.shape[:-1]), 5)] = value

    return hit


@pytest.mark.parametrize(
    ("backend", "checkpointing", "some"),
    [(None, None, slice(4)), (None, FullAC.Config(), slice(2, None, 2)), ("aot_eager", None, slice(3, None, 2))],
    ids=["eager", "full checkpointing", "compiled"],
)
def test_replays_find_what_python_finds_in_other_slots_with_other_weights(touched, backend, checkpointing, some):
    runs = [Run(how, backend, checkpointing) for how in ("graphs", "python", "stock")]
    for slot in range(2):  # one to warm up, one to record
        assert equal(*[each.slot(1, slot) for each in runs][:2])
    (graph,) = Graph.recorded
    doors = {
        (layer, section): (place_of(graph, touched[layer, section]), 0)
        for layer, section in [(0, "wqkv.y"), (1, "wo.y"), (1, "wqkv.dx"), (0, "wo.dw")]
    }
    doors[0, "attention.forward"] = kernel_at(graph, ""), 0
    doors[1, "attention.backward"] = kernel_at(graph, "_backward"), 1
    doors = list(doors.items())[some]
    for step, (where, (place, output)) in enumerate(doors, 2):
        for each in runs:
            each.commit()
        clean = [each.slot(step, 0) for each in runs]
        assert equal(*clean[:2])
        assert clean[0][2:] == (False, [])
        assert equal(clean[0][:2], clean[2]), "checks change nothing"
        value = torch.nan if step % 2 else 1e3
        hit = [each.slot(step, 1, hits={place: wrong(value, output)}) for each in runs[:2]]
        assert equal(*hit)
        assert where in [(f["layer"], f["section"]) for f in hit[0][3]]
        if hit[0][2]:  # taken back
            assert not any(each.slot(step, 1)[2] for each in runs[:2])
        runs[2].slot(step, 1)
    assert Graph.recorded == [graph]
    assert graph.replays > 2 * len(doors)


def test_nothing_of_a_slot_is_seen_in_the_next_one_and_no_python_runs_in_replays(touched):
    run = Run("graphs", mode="detect")
    for slot in range(2):
        run.slot(1, slot)
    (graph,) = Graph.recorded
    place, calls = place_of(graph, touched[0, "wqkv.y"]), len(touched[0, "wqkv.y"])
    for slot in range(2, 8):
        _, _, refused, found = run.slot(1, slot, hits={place: wrong()} if slot % 2 else None)
        assert refused == bool(found) == (slot % 2 == 1)
    assert len(touched[0, "wqkv.y"]) == calls == 2


def test_a_bound_that_is_widened_after_the_recording_is_wider_in_replays(touched):
    run = Run("graphs", mode="detect")
    for slot in range(2):
        run.slot(1, slot)
    (graph,) = Graph.recorded
    y, other = (place_of(graph, touched[layer, "wo.y"]) for layer in (0, 1))
    _, _, refused, found = run.slot(1, 2, hits={y: wrong(30.0)})
    assert refused
    assert (found[0]["layer"], found[0]["section"]) == (0, "wo.y")
    (sighting,) = [s for s in run.checks.statement([2]).seen[2] if s.place == (0, "wo.y")]
    assert run.checks.widen((sighting,))
    again = run.slot(1, 3, hits={y: wrong(30.0)})[3]
    assert (0, "wo.y") not in [(f["layer"], f["section"]) for f in again]
    for where, value in ((y, torch.nan), (y, 300.0), (other, 30.0)):
        assert run.slot(1, 4, hits={where: wrong(value)})[2]
    run.checks.learn({(0, "wo.y"): type(run.checks.allowance[0, "wo.y"])(1.0, 1e4)})
    assert (0, "wo.y") not in [(f["layer"], f["section"]) for f in run.slot(1, 5, hits={y: wrong(300.0)})[3]]


def test_slots_that_are_not_drawn_replay_a_graph_without_checks():
    run = Run("graphs", frequency=0.5)
    for slot in range(4):
        run.slot(1, slot, whole=slot % 2 == 0)
    checked, plain = Graph.recorded
    assert len(plain.noted) < 0.3 * len(checked.noted)
    products = [kernel_at(graph, "") for graph in (checked, plain)]
    for slot, whole in enumerate((True, False, False, True, False, True), 4):
        plain_before = plain.replays
        hits = {products[0 if whole else 1]: wrong(torch.inf)}
        loss, _, _, found = run.slot(1, slot, whole=whole, hits=hits)
        assert bool(found) == whole
        assert loss.isfinite() == whole, "repaired where it was looked at"
        assert plain.replays == plain_before + (not whole)
        for parameter in run.model.parameters():
            parameter.grad.zero_()
    assert len(Graph.recorded) == 2


@pytest.mark.parametrize(
    ("backend", "kind", "section"),
    [(None, "nan", "*.[dy]*"), (None, "tile", "d[qkv]"), ("aot_eager", "inf", "context")],
)
def test_the_injectors_faults_are_put_into_replays_and_found_as_without_graphs(backend, kind, section):
    plan = Inject(kind=kind, section=section, first_step=3, every=2, bit=30, magnitude=-1e4)
    known = {"allow_injection": True, "inject": plan, "rerun": "never"}
    told = []
    for how in ("graphs", "eager"):
        run, found = Run(how, backend, **known), []
        for step in range(1, 7):
            _, _, refused, findings = run.slot(step, 0)
            found.append([(step, refused and kind != "inf", f["layer"], f["section"], f["kind"]) for f in findings])
            run.model.zero_grad(set_to_none=False)
            run.checks.committed()
        told.append((found, run.checks.injector.hits))
    assert told[0] == told[1]
    assert [bool(found) for found in told[0][0]] == [step in (3, 5) for step in range(1, 7)]
    assert len(Graph.recorded) == 1


def test_a_fault_that_is_ordered_after_the_recording_is_put_into_one_replay():
    run = Run("graphs")
    injector, ordered = run.checks.injector, 0
    injector.always = True  # as chaos has it
    for slot in range(10):
        if slot > 2 and slot % 2:
            injector.order(Fault("nan", 0.4), f"{slot}")
        found, struck = run.slot(1, slot)[3], injector.hits[ordered:]  # scores are not among them
        assert {f["layer"] for f in found} >= {layer for _, layer, _ in struck}
        assert bool(found) == bool(struck)
        ordered = len(injector.hits)
    assert ordered >= 2
    assert len(Graph.recorded) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bitflip", "inf", "nan", "near-inf", "scale", "row", "tile"])
def test_a_standing_fault_is_the_fault(kind, dtype):
    x = torch.randn(2, 40, 48).to(dtype)
    x[0, 0, 0] = -0.0
    fault, bits = (
        Fault(kind, 0.37, bit=14, magnitude=7.0, sign=-1),
        torch.int16 if dtype == torch.bfloat16 else torch.int32,
    )
    standing = StandingFault(x)
    for given in (None, fault, None):
        standing.set(given)
        expected = x if given is None else inject(x, fault)
        assert torch.equal(standing.put(x).view(bits), expected.view(bits))


def test_a_recording_that_looks_at_a_verdict_or_copies_from_the_host_fails(monkeypatch):
    run = Run("graphs")
    run.slot(1, 0)
    monkeypatch.setattr(Guard, "looks", lambda guard, x: True)
    with pytest.raises(RuntimeError, match="wait for the device"):
        run.slot(1, 1)


def test_what_cannot_be_recorded_is_refused_by_its_key(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for path, disabled, refused in (("explicit", False, True), ("explicit", True, False), ("auto", False, False)):
        config = trainer_config(MODELS["llama3"]())
        config.training.disable_cuda_graphs = disabled
        section = AttentionCheck(enable=True, path=path)
        with pytest.raises(ValueError, match=r"attention_check\.path") if refused else contextlib.nullcontext():
            override.apply(config, section)
    alone = SimpleNamespace(config=SimpleNamespace(fault_tolerance=SimpleNamespace(enable=False)))
    with pytest.raises(ValueError, match=r"fault_tolerance\.enable"):
        override.record_both(alone, None)


def scheduled(check_s, frequency=None, steps=40):
    """Which of its slots of a second are checked, where a slot with checks takes so much longer."""
    schedule, drawn = SlotSchedule(frequency, residual_risk=1e-5, max_overhead=0.02, seed=1), []
    for step in range(1, steps + 1):
        for slot in range(8):
            whole = schedule.looks(step, slot)
            schedule.begin(step, slot, whole=whole)
            if drawn.count(whole) < 2:  # Python runs in no more than those
                schedule.checking(3, "wo.y", flops=1e16, cost=1e6)
            schedule.slot_took(1.0 + check_s * whole, crowded=whole)
            drawn.append(whole)
        schedule.committed()
    return schedule, drawn


def test_rates_draw_slots_and_keep_below_the_ceiling_of_time():
    schedule, drawn = scheduled(check_s=0.2)
    turns = 2 + SLOTS_MEASURED
    assert drawn[: 2 * turns] == [True, False] * turns
    assert sum(drawn[2 * turns :]) / len(drawn[2 * turns :]) == pytest.approx(0.1, abs=0.04)
    assert schedule.plan.overhead == pytest.approx(0.02)
    assert schedule.plan.residual_risk == pytest.approx((1 - schedule.plan.least_rate) * 2e-25 * 8e16 * 1e6, rel=0.5)
    assert sum(scheduled(check_s=1e-4)[1][16:]) > 0.97 * (len(drawn) - 16), "what costs little is looked at"
    assert sum(scheduled(check_s=0.2, frequency=0.25)[1]) / len(drawn) == pytest.approx(0.25, abs=0.06)
    assert all(scheduled(0.2, 1.0)[1])
    assert not any(scheduled(0.2, 0.0)[1])


def test_a_finding_has_slots_checked_from_the_next_one_on():
    schedule, _ = scheduled(check_s=5.0)
    assert not all(schedule.looks(41, slot) for slot in range(20))
    schedule.begin(41, 0)
    schedule.found(3)
    assert all(schedule.looks(41, slot) for slot in range(20))
