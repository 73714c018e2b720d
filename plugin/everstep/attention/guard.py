"""What a checked module asks before a check and tells after it."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from .evidence import Evidence, Verdict, judge
from .findings import Deviation, FindingLog
from .injection import Fault, Injector, inject
from .private import recomputing
from .schedule import Plan, Schedule
from .section import AttentionCheck


class Judgement(NamedTuple):
    """A verdict, in words for an event, and the evidence whose bounds were widened."""

    verdict: Verdict
    reason: str
    widened: Evidence = ()


class Checks:
    """The attention check of one rank: what the training step talks to.

    `begin` before a slot's forward, `refused` after its backward, `committed` after the step. Nothing else is
    needed.

    Args:
        section: the config's `[attention_check]`.
        rank: this rank, named in findings and drawn upon by the injector.
        seed: draws which calls are checked when the frequency is not 0 or 1.
    """

    def __init__(self, section: AttentionCheck, *, rank: int = 0, seed: int = 0) -> None:
        self.mode, self.rerun = section.mode, section.rerun
        self.findings = FindingLog(rank)
        self.schedule = Schedule(section.rate(), section.residual_risk, section.max_overhead, seed=seed + rank)
        self._begun = 0.0
        self._timed: list[tuple[int, str, Any, Any]] = []
        self._told: Plan | None = None
        self.injector = Injector(section.inject, rank)
        self.allowance: dict[tuple[int, str], float] = {}
        """By how much the bounds of sections were widened in this run."""
        self.coverage: Any = None
        """What of the model is guarded, where that was counted."""
        self.doubts = 0
        """Slots with a finding so far: after each, kept sums of weights are compared with their copies."""

    def guard(self, layer: int, name: str, sections: tuple[str, ...]) -> "Guard":
        """The guard of one module; `sections` are the results it can check."""
        self.injector.register(layer, sections)
        return Guard(self, layer, name)

    def begin(self, step: int, slot: int) -> None:
        """A slot's forward is about to run. step counts from 1."""
        self._begun = time.perf_counter()
        self._timed.clear()
        self.findings.begin(step, slot)
        self.schedule.begin(step, slot)
        self.injector.begin(step)

    def refused(self) -> bool:
        """Whether the slot must be computed again. One host synchronisation; call once after the backward."""
        refused = self.findings.refused()
        if self.schedule.fixed is None:
            for layer, name, begin, end in self._timed:
                end.synchronize()  # long over: the findings behind it were read
                self.schedule.took(layer, name, begin.elapsed_time(end) / 1e3)
            self._timed.clear()
            self.schedule.slot_took(time.perf_counter() - self._begun)
        for finding in self.findings.last:
            self.schedule.found(finding["layer"])
        if self.findings.last:
            self.doubts += 1
        return refused

    def evidence(self) -> Evidence:
        """What the present slot's last refusal here showed, empty where there was none: what a witness hands over."""
        refusals = self.findings.refusals()
        return refusals[-1] if refusals else ()

    def judge(self, witnesses: Sequence[Evidence] = (), *, alone: bool = False) -> Judgement:
        """Whose fault it is that the present slot was refused here; see `evidence.judge`. Call after `refused`.

        Where the bound is at fault it is widened here, for the rest of the run, to twice what was seen.
        """
        refusals = self.findings.refusals()
        verdict = judge(refusals, witnesses, alone=alone)
        if verdict in (Verdict.AGAIN, Verdict.WITNESS):
            return Judgement(verdict, "")
        story = self.findings.describe()
        self.findings.judged()
        if verdict is Verdict.BOUND:
            self.widen(refusals[-1])
            why = "computed the same" if witnesses else "was not there to ask, and every attempt gave the same"
            return Judgement(verdict, f"{story}. Another group {why}: the bounds are widened.", refusals[-1])
        if verdict is Verdict.NOT_FINITE or not any(s.own for evidence in refusals for s in evidence):
            return Judgement(
                Verdict.NOT_FINITE,
                f"{story}. The values were not finite when the checks were given them, or on another group as well: "
                "look for the error outside attention, or on another rank of this group.",
            )
        return Judgement(verdict, f"{story}. The error is this device's alone: take it out of service.")

    def widen(self, evidence: Evidence) -> None:
        """Widen the bounds of these sections, on this rank and for this run, to twice what was seen."""
        for s in evidence:
            if s.finite:
                allowed = self.allowance.get((s.layer, s.section), 1.0)
                self.allowance[s.layer, s.section] = allowed * max(2.0 * s.ratio, 1.0)

    def drain(self) -> list[dict[str, Any]]:
        """Findings since the last call, as the fields of `finding` events."""
        return self.findings.drain()

    def news(self) -> dict[str, float] | None:
        """What the checks take and leave, as the fields of an event, where that changed by a quarter since it was last
        told; else None."""
        plan, told = self.schedule.plan, self._told
        if plan is None or (
            told is not None and all(0.8 < (x + 1e-30) / (y + 1e-30) < 1.25 for x, y in zip(plan, told, strict=True))
        ):
            return None
        self._told = plan
        return plan._asdict()

    def committed(self) -> None:
        """The step's optimizer has run: weights changed, and rates are derived anew."""
        self.schedule.committed()

    def weights_changed(self) -> None:
        """Weights changed otherwise: a heal, a checkpoint."""
        self.schedule.weights_changed()


_numbers = itertools.count()
_guards: WeakValueDictionary[int, "Guard"] = WeakValueDictionary()


def guard_of(ticket: torch.Tensor) -> "Guard":
    """The guard whose ticket this is."""
    return _guards[int(ticket[0])]


class Guard:
    """One module's side of the checks."""

    def __init__(self, checks: Checks, layer: int, name: str) -> None:
        self.checks, self.layer, self.name = checks, layer, name
        self.correct = checks.mode == "correct"
        self.ticket = torch.tensor([next(_numbers), 0])
        """This guard's number, and how often operators used it: what stands for the guard in a compiled graph."""
        self.kept: Any = None
        """What an operator keeps from call to call."""
        _guards[int(self.ticket[0])] = self

    def checking(self, section: str, *, flops: float, cost: float, backward: bool = False) -> bool:
        """Whether this call's `section` is to be checked.

        flops: of what the check protects. cost: elements that the check reads. The answer is the same for
            every call in one slot, so that activation checkpointing runs the same operations twice.
        """
        again = not backward and recomputing()
        return self.checks.schedule.checking(self.layer, section, flops=0.0 if again else flops, cost=cost)

    @contextlib.contextmanager
    def timing(self, section: str, device: torch.device) -> Iterator[None]:
        """Around a check: measures what it takes, the first few times, for adaptive rates."""
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

    def will_check(self, section: str) -> bool:
        """What `checking` answers for this slot, without a call counted."""
        return self.checks.schedule.will_check(self.layer, section)

    def widened(self, section: str, seen: Deviation) -> Deviation:
        """`seen`, its bounds widened where they were found to be at fault."""
        allowed = self.checks.allowance.get((self.layer, section))
        return seen if allowed is None else Deviation(seen.residual, seen.bound * allowed, seen.scale)

    @property
    def reruns(self) -> bool:
        """Whether a checked forward of a fused kernel is run twice and compared."""
        return self.checks.rerun == "always"

    @property
    def injecting(self) -> bool:
        """Whether this run injects faults at all."""
        return self.checks.injector.active

    def fault(self, section: str, *, backward: bool = False, part: int = 0, parts: int = 1) -> Fault | None:
        """The fault to inject into this result, if one is due. A forward's second run is spared."""
        if not backward and recomputing():
            return None
        return self.checks.injector.strike(self.layer, section, part, parts)

    def touch(
        self, section: str, result: torch.Tensor, *, backward: bool = False, part: int = 0, parts: int = 1
    ) -> torch.Tensor:
        """`result`, or a copy with the fault that is due in it."""
        fault = self.fault(section, backward=backward, part=part, parts=parts)
        return result if fault is None else inject(result, fault)

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
