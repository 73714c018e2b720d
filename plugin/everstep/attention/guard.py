"""What a checked module asks before a check and tells after it."""

from typing import Any

import torch

from .findings import FindingLog, recomputing
from .injection import Fault, Injector, inject
from .schedule import Schedule
from .section import AttentionCheck


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
        self.schedule = Schedule(section.rate(), section.residual_risk, seed=seed + rank)
        self.injector = Injector(section.inject, rank)

    def guard(self, layer: int, name: str, sections: tuple[str, ...]) -> "Guard":
        """The guard of one module; `sections` are the results it can check."""
        self.injector.register(layer, sections)
        return Guard(self, layer, name)

    def begin(self, step: int, slot: int) -> None:
        """A slot's forward is about to run. step counts from 1."""
        self.findings.begin(step, slot)
        self.schedule.begin(step, slot)
        self.injector.begin(step)

    def refused(self) -> bool:
        """Whether the slot must be computed again. One host synchronisation; call once after the backward."""
        refused = self.findings.refused()
        for finding in self.findings.last:
            self.schedule.found(finding["layer"])
        return refused

    def reason_to_leave(self) -> str | None:
        """Why the group must leave, once the same slot was refused twice on this rank; else None."""
        return self.findings.reason_to_leave()

    def drain(self) -> list[dict[str, Any]]:
        """Findings since the last call, as the fields of `finding` events."""
        return self.findings.drain()

    def committed(self, step: int) -> None:
        """The step's optimizer has run: weights changed, and rates are derived anew."""
        self.schedule.committed(step)

    def weights_changed(self) -> None:
        """Weights changed otherwise: a heal, a checkpoint."""
        self.schedule.weights_changed()


class Guard:
    """One module's side of the checks."""

    def __init__(self, checks: Checks, layer: int, name: str) -> None:
        self.checks, self.layer, self.name = checks, layer, name
        self.correct = checks.mode == "correct"

    def checking(self, section: str, *, flops: float, cost: float, backward: bool = False) -> bool:
        """Whether this call's `section` is to be checked.

        flops: of what the check protects. cost: elements that the check reads. The answer is the same for
            every call in one slot, so that activation checkpointing runs the same operations twice.
        """
        again = not backward and recomputing()
        return self.checks.schedule.checking(self.layer, section, flops=0.0 if again else flops, cost=cost)

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
