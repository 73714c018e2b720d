"""What the checks saw in a slot.

A check leaves a small vector on the device and goes on; nothing waits for it. At the end of the slot
`FindingLog.refused()` brings all of them to the host at once, the only synchronisation there is, and says
whether the slot must be computed again. `drain()` then hands out the findings as events.
"""

import math
import socket
from collections import defaultdict
from typing import Any, NamedTuple

import torch

KINDS = ("nan", "inf", "near-inf", "moderate", "checksum")
"""What a finding looked like, worst first. `near-inf`: finite, but larger than the operands allow.
`checksum`: the result was right, its checksum was not."""

_FIELDS = ("corrected", "recomputed", "refused", *KINDS, "own", "magnitude")

REFUSALS = 2
"""Refusals of one slot after which a rank whose own arithmetic was wrong leaves."""

REFUSALS_INHERITED = 3
"""The same for a rank that only ever saw what it was given: one more, so that the rank it came from goes first."""


class Deviation:
    """How results compare with their checksums, on the device.

    residual: checksum less sum, any shape. bound: what round-off explains. scale: the largest that the sum of
    a correct result can be. bound and scale broadcast against residual.
    """

    __slots__ = ("bound", "residual", "scale")

    def __init__(self, residual: torch.Tensor, bound: torch.Tensor, scale: torch.Tensor) -> None:
        self.residual, self.bound, self.scale = residual, bound, scale

    def bad(self) -> torch.Tensor:
        """True where round-off does not explain the residual. NaN is bad."""
        return ~(self.residual.abs() <= self.bound)


def outcome(
    seen: Deviation,
    *,
    corrected: torch.Tensor | int = 0,
    recomputed: torch.Tensor | int = 0,
    refused: torch.Tensor | int = 0,
    checksum: torch.Tensor | bool = False,
) -> torch.Tensor:
    """One check's record: counts by action, counts by kind, how much is wrong by this rank's own arithmetic, and the
    largest finite deviation, float64, on the device.

    A bound or scale that is not finite says that the operands were not: the error was handed in, by an earlier result
    or, where ranks compute one layer together, by another rank.

    checksum: the checksum was what broke; all of `seen` then counts as that.
    """
    bad, residual = seen.bad(), seen.residual
    nan = bad & residual.isnan()
    inf = bad & residual.isinf()
    near = bad & residual.isfinite() & (residual.abs() > seen.scale)
    moderate = bad & ~nan & ~inf & ~near
    kinds = torch.stack([nan.sum(), inf.sum(), near.sum(), moderate.sum()]).double()
    total = kinds.sum()
    broken = torch.as_tensor(checksum, device=residual.device)
    kinds = torch.where(broken, torch.zeros_like(kinds), kinds)
    finite = torch.where(bad & residual.isfinite(), residual.abs(), torch.zeros_like(residual))
    actions = [torch.as_tensor(x, device=residual.device).double() for x in (corrected, recomputed, refused)]
    largest = finite.max() if finite.numel() else finite.sum()
    own = (bad & seen.scale.isfinite() & seen.bound.isfinite()).sum().double()
    rest = torch.stack([torch.where(broken, total, 0.0), own, largest.double()])
    return torch.cat([torch.stack(actions), kinds, rest])


def recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing computes it again."""
    return torch._C._current_graph_task_id() != -1


class _Refusal(NamedTuple):
    """Where a slot was refused, and whether by this rank's own arithmetic."""

    where: str
    own: bool


class FindingLog:
    """Findings of one rank, slot by slot.

    Args:
        rank: named in every finding.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._step = self._slot = 0
        self._records: list[tuple[int, str, bool, torch.Tensor]] = []
        self._findings: list[dict[str, Any]] = []
        self._refusals: defaultdict[tuple[int, int], list[_Refusal]] = defaultdict(list)
        self.last: list[dict[str, Any]] = []
        """Findings of the slot that `refused` judged last."""

    def begin(self, step: int, slot: int) -> None:
        """A slot's computation begins. What an earlier, abandoned one left is dropped."""
        if step != self._step:
            self._refusals.clear()
        self._step, self._slot = step, slot
        self._records.clear()

    def record(self, layer: int, section: str, vector: torch.Tensor, *, again: bool = False) -> None:
        """Keep one check's `outcome`. again: from a forward that activation checkpointing computes a second
        time."""
        self._records.append((layer, section, again, vector))

    def refused(self) -> bool:
        """Whether this slot has a finding that was not repaired, so that its gradient must not be used.

        One host synchronisation when anything was recorded, none otherwise. Call once, after the backward.
        """
        self.last = []
        if not self._records:
            return False
        by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
        for i, (_, _, _, vector) in enumerate(self._records):
            by_device[vector.device].append(i)
        values: dict[int, list[float]] = {}
        for indices in by_device.values():
            stacked = torch.stack([self._records[i][3] for i in indices]).tolist()
            values.update(zip(indices, stacked, strict=True))
        merged: dict[tuple[int, str], dict[bool, list[float]]] = defaultdict(dict)
        for i, (layer, section, again, _) in enumerate(self._records):
            if any(values[i][:-1]):
                passes = merged[layer, section]
                passes[again] = _merge(passes.get(again), values[i])
        self._records.clear()
        # A finding of the first pass that checkpointing's second pass sees too is one finding. One that only
        # the second pass sees is a fault of its own: that pass feeds the backward.
        found = [
            self._finding(layer, section, passes[min(passes)]) for (layer, section), passes in sorted(merged.items())
        ]
        self.last = found
        self._findings += found
        own = [dict(zip(_FIELDS, passes[min(passes)], strict=True))["own"] > 0 for _, passes in sorted(merged.items())]
        refusing = [(f, mine) for f, mine in zip(found, own, strict=True) if f["action"] == "refused"]
        if refusing:
            mine = [f for f, is_own in refusing if is_own]
            named = [f"layer {f['layer']} {f['section']} ({f['kind']})" for f in mine or [f for f, _ in refusing]]
            self._refusals[self._step, self._slot].append(_Refusal(", ".join(named), bool(mine)))
        return bool(refusing)

    def reason_to_leave(self) -> str | None:
        """Why this rank's group must leave: the same slot was refused twice here for what this rank computed, or
        three times for what it was given. None as long as it was not."""
        refusals = self._refusals.get((self._step, self._slot), [])
        own = [refusal for refusal in refusals if refusal.own]
        here = f"rank {self.rank} on host {socket.gethostname()}"
        slot = f"slot {self._slot} of step {self._step}"
        if len(own) >= REFUSALS:
            return (
                f"{here} refused {slot} {len(own)} times: {'; then '.join(refusal.where for refusal in own)}. "
                "The error recurs on this device: take it out of service."
            )
        if len(refusals) >= REFUSALS_INHERITED:
            return (
                f"{here} refused {slot} {len(refusals)} times, the last time in {refusals[-1].where}, for values that "
                "were not finite when its checks were given them: look for the error on another rank of this "
                "group, or outside attention."
            )
        return None

    def drain(self) -> list[dict[str, Any]]:
        """The findings since the last call, oldest first, as the fields of `finding` events."""
        findings, self._findings = self._findings, []
        return findings

    def _finding(self, layer: int, section: str, vector: list[float]) -> dict[str, Any]:
        fields = dict(zip(_FIELDS, vector, strict=True))
        action = next((name for name in ("refused", "recomputed", "corrected") if fields[name]), "corrected")
        return {
            "step": self._step,
            "slot": self._slot,
            "layer": layer,
            "section": section,
            "rank": self.rank,
            "kind": next((kind for kind in KINDS if fields[kind]), "moderate"),
            "magnitude": fields["magnitude"] if math.isfinite(fields["magnitude"]) else None,
            "count": int(sum(fields[kind] for kind in KINDS)),
            "action": action,
        }


def _merge(a: list[float] | None, b: list[float]) -> list[float]:
    if a is None:
        return b
    return [x + y for x, y in zip(a[:-1], b[:-1], strict=True)] + [max(a[-1], b[-1])]
