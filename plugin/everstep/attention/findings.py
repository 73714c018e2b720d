"""What the checks saw.

A check leaves one number on the device and goes on; nothing waits for it. When it matters `FindingLog.refused()` brings
all of them to the host at once, the only synchronisation there is, and says which slots must be computed again.
`drain()` then hands out the findings as events.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import torch

ACTIONS = ("corrected", "recomputed", "refused")
"""What became of what was wrong: rebuilt from its checksums, computed again in place, or nothing: then the slot is."""


class Deviation(NamedTuple):
    """How results compare with their checksums, on the device.

    residual: checksum less sum, any shape. bound: what round-off explains, above 0; broadcasts against residual.
    """

    residual: torch.Tensor
    bound: torch.Tensor

    def bad(self) -> torch.Tensor:
        """True where round-off does not explain the residual. NaN is bad."""
        return ~(self.residual.abs() <= self.bound)

    def worst(self) -> torch.Tensor:
        """The largest residual in units of its bound, a scalar on the device; above 1, INF or NaN: it is bad."""
        apart = self.residual.abs() / self.bound
        return apart.amax() if apart.numel() else apart.sum()


class Record(NamedTuple):
    """One check's outcome. again: from a forward that activation checkpointing computes a second time. worst: what was
    found, in units of `bound`, whose sign it has, on whatever device: above 1, INF or NaN it is wrong."""

    step: int
    slot: int
    layer: int
    section: str
    action: str
    again: bool
    worst: torch.Tensor
    bound: float = 1.0


class FindingLog:
    """Findings of one rank.

    Args:
        rank: named in every finding.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._records: list[Record] = []
        self._findings: list[dict[str, Any]] = []
        self.last: list[dict[str, Any]] = []
        """Findings that `refused` saw last."""

    def record(self, record: Record) -> None:
        """Keep one check's outcome."""
        self._records.append(record)

    def forget(self) -> None:
        """What was recorded since it was last read is of slots that nobody will use."""
        self._records = []

    def refused(self) -> frozenset[int]:
        """Slots, of those since this was last asked, with a finding that was not repaired: their gradients must not be
        used. One host synchronisation when anything was recorded, none otherwise."""
        records, self._records = self._records, []
        passes: defaultdict[tuple[int, int, int, str], dict[bool, list[tuple[int, float]]]] = defaultdict(dict)
        for record, worst in zip(records, _read(records), strict=True):
            size = worst / record.bound
            if not size <= 1:
                passes[record[:4]].setdefault(record.again, []).append((ACTIONS.index(record.action), size))
        # A finding of the first pass that checkpointing's second pass sees too is one finding. One that only
        # the second pass sees, or does not repair, is a fault of its own: that pass feeds the backward.
        self.last = [self._finding(*place, _worse_pass(seen)) for place, seen in sorted(passes.items())]
        self._findings += self.last
        return frozenset(finding["slot"] for finding in self.last if finding["action"] == "refused")

    def drain(self) -> list[dict[str, Any]]:
        """Findings since the last call, as the fields of `finding` events."""
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
    """Of what two passes did at one place, what the one did that repaired less; the first if they did the same."""
    return max((seen[again] for again in sorted(seen)), key=lambda made: max(action for action, _ in made))


def _read(records: list[Record]) -> list[float]:
    """What each record says, brought to the host at once from each device."""
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for i, record in enumerate(records):
        by_device[record.worst.device].append(i)
    values = [0.0] * len(records)
    for indices in by_device.values():
        stacked = torch.stack([records[i].worst for i in indices]).tolist()
        for i, value in zip(indices, stacked, strict=True):
            values[i] = value
    return values
