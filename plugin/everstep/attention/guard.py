"""What a checked module asks before a check and tells after it."""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from .evidence import SAME, Allowance, Evidence, Place, Statement, Verdict, judge, shared
from .findings import Deviation, FindingLog
from .injection import Fault, Injector, StandingFault, inject
from .private import recomputing
from .schedule import Plan, Schedule, SlotSchedule
from .section import AttentionCheck


class Judgement(NamedTuple):
    """What became of a slot's refusals on this rank.

    reason: for an event. evidence: what it follows from. leaves: whether this rank must not go on.
    """

    verdict: Verdict
    reason: str = ""
    evidence: Evidence = ()
    leaves: bool = False


class Checks:
    """The attention check of one rank: what the training step talks to.

    `begin` before a slot's forward, `refused` after its backward, `committed` after the step. Nothing else is
    needed.

    Args:
        section: the config's `[attention_check]`.
        rank: this rank, named in findings and drawn upon by the injector.
        seed: draws which calls are checked when the frequency is not 0 or 1.
        recorded: whether slots are replays of recorded graphs, one with every check in it and one with none. Then
            slots are drawn and not calls, and what changes from slot to slot is in tensors that stay where they are.
    """

    def __init__(self, section: AttentionCheck, *, rank: int = 0, seed: int = 0, recorded: bool = False) -> None:
        self.mode, self.rerun, self.recorded = section.mode, section.rerun, recorded
        self.findings = FindingLog(rank, recorded=recorded)
        rates = section.rate(), section.residual_risk, section.max_overhead
        # All ranks of a group replay the same graph, and so draw alike.
        self.schedule = SlotSchedule(*rates, seed=seed) if recorded else Schedule(*rates, seed=seed + rank)
        self._begun: Any = None
        self._slots: deque[tuple[bool, Any, Any]] = deque()
        self._faults: dict[Place, StandingFault] = {}
        """Of recorded graphs, by the result that they are put into."""
        self._widths: dict[Place, tuple[torch.Tensor, ...]] = {}
        """What `allowance` says, on the device, where a graph reads it."""
        self._timed: list[tuple[int, str, Any, Any]] = []
        # Asked once: to look for a device takes as long as a small check.
        self._device = torch.accelerator.current_accelerator(check_available=True)
        self._told: Plan | None = None
        self._fixed = self.schedule.fixed
        self.injector = Injector(section.inject, rank)
        self.allowance = self.findings.allowance
        self.coverage: Any = None
        """What of the model is guarded, where that was counted."""
        self.doubts = 0
        """Slots with a finding so far: after each, kept sums of weights are compared with their copies."""

    def guard(self, layer: int, name: str, sections: tuple[str, ...]) -> "Guard":
        """The guard of one module; `sections` are the results it can check."""
        self.injector.register(layer, sections)
        return Guard(self, layer, name)

    def begin(self, step: int, slot: int, *, whole: bool = False) -> None:
        """A slot's forward is about to run. step counts from 1. whole: check every call of it, at whatever rate."""
        self._begun = self._now()
        self._timed.clear()
        self.findings.begin(step, slot, whole=whole or self.schedule.fixed == 1.0)
        self.schedule.begin(step, slot, whole=whole)
        self.injector.begin(step)
        for place, fault in self._faults.items():
            fault.set(self.injector.strike(*place))

    def refused(self) -> bool:
        """Whether the slot must be computed again. One host synchronisation; call once after the backward."""
        refused = self.findings.refused()
        if self.schedule.fixed is None:
            for layer, name, begin, end in self._timed:
                end.synchronize()  # long over: the findings behind it were read
                self.schedule.took(layer, name, begin.elapsed_time(end) / 1e3)
            self._timed.clear()
            self._slots.append((self.schedule.crowded, self._begun, self._now()))
            # A slot of which nothing is read may not be over yet.
            while self._slots and (isinstance(self._slots[0][2], float) or self._slots[0][2].query()):
                crowded, begin, end = self._slots.popleft()
                seconds = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
                self.schedule.slot_took(seconds, crowded=crowded)
        for finding in self.findings.last:
            self.schedule.found(finding["layer"])
        if self.findings.last:
            self.doubts += 1
        return refused

    def statement(self, slots: Iterable[int] = ()) -> Statement:
        """What other groups should know of these slots of the present step, and of the bounds widened here."""
        seen = {slot: self.findings.seen(slot) for slot in slots}
        return Statement({slot: times[-1] for slot, times in seen.items() if times}, dict(self.allowance))

    def learn(self, allowed: dict[Place, Allowance]) -> None:
        """Another rank of this rank's column has widened these bounds."""
        for place, allowance in allowed.items():
            wider = self.allowance[place] = allowance.wider(self.allowance.get(place, Allowance()))
            for tensor, value in zip(self._widths.get(place, ()), wider, strict=False):
                tensor.fill_(value)

    def judge(self, slot: int, witnesses: Sequence[Evidence] = (), *, alone: bool = False) -> Judgement:
        """Whose fault it is that this slot of the present step was refused; see `everstep.attention.evidence`.

        Where the bound is at fault it is widened here, for the rest of the run, to twice what was seen, and what is
        not finite on another group either refuses this slot no more: also on a rank that did not compute it itself.

        Args:
            witnesses: what the same rank of other groups saw. An empty one looked at all of it and saw nothing.
            alone: no other group can be asked, or none that has not refused the slot as often as this one.
        """
        times = self.findings.seen(slot)
        common = shared([*times[-1:], *filter(None, witnesses)], math.inf if alone else SAME)
        widened, accepted = self.widen(common), self.findings.accept(slot, common)
        own = self.findings.unexplained(slot)
        witnessed = any(not evidence for evidence in witnesses) or (alone and bool(witnesses))
        verdict = judge(own, witnessed=witnessed, alone=alone)
        undecided = verdict in (Verdict.AGAIN, Verdict.WITNESS)
        if undecided and not (times and (accepted or widened)):
            return Judgement(verdict)
        story = self.findings.describe(slot)
        if undecided:
            if accepted:
                reason = f"{story}. On another group the same is not finite: it is let pass."
                return Judgement(Verdict.NOT_FINITE, reason, accepted + widened)
            return Judgement(Verdict.BOUND, f"{story}. Another group got the same: bounds are widened.", widened)
        self.findings.judged(slot)
        if verdict is Verdict.BOUND:
            why = "It is too little to name this rank" if witnessed else "No other group could be asked, and it stays"
            return Judgement(verdict, f"{story}. {why}: bounds are widened.", self.widen(own[-1]))
        if verdict is Verdict.NOT_FINITE:
            return Judgement(
                verdict,
                f"{story}. The values were not finite when the checks were given them: look for the error outside "
                "attention, or on another rank of this group.",
                own[-1],
                leaves=True,
            )
        why = "Another group computed the slot and saw none of it" if witnessed else "It is another error each time"
        return Judgement(
            verdict, f"{story}. {why}: the error is this device's, take it out of service.", own[-1], leaves=True
        )

    def widen(self, evidence: Evidence) -> Evidence:
        """Widen the bounds of these sections, on this rank and for this run, to twice what was seen; what of it they
        did not allow before."""
        new = tuple(
            s for s in evidence if s.finite and not (s.place in self.allowance and self.allowance[s.place].explains(s))
        )
        self.learn({s.place: Allowance.of(s) for s in new})
        return new

    def drain(self) -> list[dict[str, Any]]:
        """Findings since the last call, as the fields of `finding` events."""
        return self.findings.drain()

    def news(self) -> dict[str, float] | None:
        """What the checks take and leave, as the fields of an event, where that changed by a quarter since it was last
        told; else None. Of a fixed rate, once."""
        plan, told = self.schedule.plan, self._told
        if self.schedule.fixed is not None:
            fixed, self._fixed = self._fixed, None
            return None if fixed is None else {"least_rate": fixed}
        if plan is None or (
            told is not None and all(0.8 < (x + 1e-30) / (y + 1e-30) < 1.25 for x, y in zip(plan, told, strict=True))
        ):
            return None
        self._told = plan
        return plan._asdict()

    def committed(self) -> None:
        """The step's optimizer has run: weights changed, and rates are derived anew."""
        self.findings.forget()
        self.schedule.committed()

    def weights_changed(self) -> None:
        """Weights changed otherwise: a heal, a checkpoint."""
        self.findings.forget()
        self.schedule.weights_changed()

    def _now(self) -> Any:
        """A point in what the device was given to do; without one, in seconds."""
        if self._device is None:
            return time.perf_counter()
        point = torch.Event(self._device, enable_timing=True)
        point.record()
        return point


_numbers = itertools.count()
_guards: WeakValueDictionary[int, "Guard"] = WeakValueDictionary()


def guard_of(ticket: torch.Tensor) -> "Guard":
    """The guard whose ticket this is."""
    return _guards[int(ticket)]


class Guard:
    """One module's side of the checks."""

    def __init__(self, checks: Checks, layer: int, name: str) -> None:
        self.checks, self.layer, self.name = checks, layer, name
        self.correct, self.recorded = checks.mode == "correct", checks.recorded
        self.ticket = torch.tensor(next(_numbers))
        """This guard's number, which stands for it in a compiled graph."""
        self.kept: Any = None
        """What an operator keeps from call to call."""
        _guards[int(self.ticket)] = self

    @property
    def idle(self) -> bool:
        """Whether nothing of this module's layer is checked or hit in this slot: it may run as if it had no guard."""
        return self.checks.schedule.idle(self.layer) and not self.checks.injector.active

    def checking(self, section: str, *, flops: float, cost: float, backward: bool = False) -> bool:
        """Whether this call's `section` is to be checked.

        flops: of what the check protects. cost: elements that the check reads. The answer is the same for
            every call in one slot, so that activation checkpointing runs the same operations twice.
        """
        again = not backward and recomputing()
        return self.checks.schedule.checking(self.layer, section, flops=0.0 if again else flops, cost=cost)

    @contextlib.contextmanager
    def timing(self, section: str, device: torch.device) -> Iterator[None]:
        """Around a check, or a part of one: measures what it takes, for adaptive rates."""
        checks = self.checks
        if not checks.schedule.measuring(self.layer, section):
            yield
        elif device.type == "cpu":
            begin = time.perf_counter()
            yield
            checks.schedule.took(self.layer, section, time.perf_counter() - begin)
        else:
            begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            checks._timed.append((self.layer, section, begin, end))

    def widened(self, section: str, seen: Deviation) -> Deviation:
        """`seen`, its bounds widened where they were found to be at fault."""
        place, widths = (self.layer, section), self.checks._widths
        allowed: Any = self.checks.allowance.get(place)
        if self.recorded:
            if place not in widths:
                like = seen.bound.new_full
                widths[place] = tuple(like((), value) for value in allowed or Allowance())
            allowed = widths[place]
        if allowed is None:
            return seen
        factor, floor = allowed
        return Deviation(seen.residual, seen.bound * factor + floor, seen.scale)

    def looks(self, x: torch.Tensor) -> bool:
        """Whether a check looks at its verdict: it is at hand on a CPU, and a recorded graph cannot branch."""
        return x.device.type == "cpu" and not self.recorded

    @property
    def reruns(self) -> bool:
        """Whether a checked forward of a fused kernel is run twice and compared."""
        return self.checks.rerun == "always"

    @property
    def injecting(self) -> bool:
        """Whether this run injects faults at all."""
        return self.checks.injector.active

    def fault(self, section: str, *, backward: bool = False, part: int = 0, parts: int = 1) -> Fault | None:
        """The fault to inject into this result, if one is due and nothing is recorded. A forward's second run is
        spared."""
        if self.recorded or (not backward and recomputing()):
            return None
        return self.checks.injector.strike(self.layer, section, part, parts)

    def touch(
        self, section: str, result: torch.Tensor, *, backward: bool = False, part: int = 0, parts: int = 1
    ) -> torch.Tensor:
        """`result`, or a copy with the fault that is due in it."""
        if not self.recorded:
            fault = self.fault(section, backward=backward, part=part, parts=parts)
            return result if fault is None else inject(result, fault)
        if not self.injecting or (not backward and recomputing()):
            return result
        place, faults = (self.layer, section), self.checks._faults
        if place not in faults:
            faults[place] = StandingFault(result)
            faults[place].set(self.checks.injector.strike(*place))
        return faults[place].put(result)

    def report(self, section: str, vector: torch.Tensor, *, backward: bool = False) -> None:
        """Hand over one check's `outcome`."""
        self.checks.findings.record(self.layer, section, vector, again=not backward and recomputing())

    @property
    def weights_version(self) -> int:
        """Changes whenever weights do: sums of weights are kept under it."""
        return self.checks.schedule.weights_version

    @property
    def doubts(self) -> int:
        """Changes with every slot that had a finding."""
        return self.checks.doubts
