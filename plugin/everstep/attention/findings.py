"""Collects the outcomes of the checks.

A check leaves one number on the device and does not wait for it. `FindingLog.refused()` copies all of these numbers to
the host at once, the only synchronisation of the log, and returns the slots that must be computed again. `drain()` then
returns the findings for events.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import torch

ACTIONS = ("corrected", "recomputed", "refused")
"""What was done about a wrong result: rebuilt from its checksums, computed again in place, or the slot was refused."""


class Deviation(NamedTuple):
    """Differences between results and their checksums, on the device.

    residual: checksum minus sum, any shape. bound: the largest difference that round-off explains; above 0, or 0 where
    `worst` shall be above 1 whatever the residual. It broadcasts against residual.
    """

    residual: torch.Tensor
    bound: torch.Tensor

    def bad(self) -> torch.Tensor:
        """Return a mask that is true where round-off does not explain the residual. NaN is bad."""
        return ~(self.residual.abs() <= self.bound)

    def worst(self) -> torch.Tensor:
        """Return the largest residual in units of its bound, a scalar on the device. Above 1, INF or NaN is wrong."""
        apart = self.residual.abs() / self.bound
        return apart.amax() if apart.numel() else apart.sum()


class Record(NamedTuple):
    """One check's outcome. again: whether it is of a forward that activation checkpointing computes a second time.
    worst: a scalar on the device; the result is wrong unless worst / bound <= 1. bound: negative if `worst` must not
    lie below it."""

    step: int
    slot: int
    layer: int
    section: str
    action: str
    again: bool
    worst: torch.Tensor
    bound: float = 1.0


class FindingLog:
    """The findings of one rank. Each of them names the rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._records: list[Record] = []
        self._findings: list[dict[str, Any]] = []
        self.last: list[dict[str, Any]] = []
        """Findings of the last call of `refused`."""

    def record(self, record: Record) -> None:
        """Keep one check's outcome."""
        self._records.append(record)

    def forget(self) -> None:
        """Drop what was recorded since the last call of `refused`: the results of these slots are not used."""
        self._records = []

    def refused(self) -> frozenset[int]:
        """Return the slots, of those recorded since the last call, with a finding that was not repaired. Their
        gradients must not be used. Synchronises with the host once if anything was recorded, otherwise not."""
        records, self._records = self._records, []
        passes: defaultdict[tuple[int, int, int, str], dict[bool, list[tuple[int, float]]]] = defaultdict(dict)
        sizes = torch.stack([record.worst for record in records]).tolist() if records else []
        for record, worst in zip(records, sizes, strict=True):
            size = worst / record.bound
            if not size <= 1:
                passes[record[:4]].setdefault(record.again, []).append((ACTIONS.index(record.action), size))
        # A fault that both the first forward and checkpointing's second forward see is one finding. The second
        # forward also counts by itself, if it alone sees the fault or does not repair it: it feeds the backward.
        self.last = [self._finding(*place, _worse_pass(seen)) for place, seen in sorted(passes.items())]
        self._findings += self.last
        return frozenset(finding["slot"] for finding in self.last if finding["action"] == "refused")

    def drain(self) -> list[dict[str, Any]]:
        """Return the findings since the last call, as the fields of `finding` events."""
        findings, self._findings = self._findings, []
        return findings

    def _finding(self, step: int, slot: int, layer: int, section: str, seen: list[tuple[int, float]]) -> dict[str, Any]:
        sizes = [worst for _, worst in seen]
        kind = "nan" if any(map(math.isnan, sizes)) else "inf" if any(map(math.isinf, sizes)) else "moderate"
        return {
            "step": step,
            "slot": slot,
            "layer": layer,
            "section": section,
            "rank": self.rank,
            "kind": kind,
            "magnitude": max(sizes) if kind == "moderate" else None,
            "action": ACTIONS[max(action for action, _ in seen)],
        }


def _worse_pass(seen: dict[bool, list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return the outcomes of the forward that repaired less; those of the first forward if both repaired alike."""
    return max((seen[again] for again in sorted(seen)), key=lambda made: max(action for action, _ in made))
