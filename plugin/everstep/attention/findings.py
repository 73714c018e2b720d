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

from .evidence import UNBOUNDED, Allowance, Evidence, Place, Sighting

KINDS = ("nan", "inf", "near-inf", "moderate", "checksum")
"""What a finding looked like, worst first. `near-inf`: finite, but larger than the operands allow.
`checksum`: the result was right, its checksum was not."""

_FIELDS = ("corrected", "recomputed", "refused", *KINDS, "own", "magnitude", "ratio")
_LARGEST = 2
"""So many of the last fields are maxima; the others are counts."""


class Deviation(NamedTuple):
    """How results compare with their checksums, on the device.

    residual: checksum less sum, any shape. bound: what round-off explains. scale: the largest that the sum of
    a correct result can be. bound and scale broadcast against residual.
    """

    residual: torch.Tensor
    bound: torch.Tensor
    scale: torch.Tensor

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
    largest finite deviation, as it is and in units of its bound; float64, on the device.

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
    broken = _on(checksum, residual)
    kinds = torch.where(broken > 0, torch.zeros_like(kinds), kinds)
    finite = torch.where(bad & residual.isfinite(), residual.abs(), torch.zeros_like(residual))
    actions = [_on(x, residual) for x in (corrected, recomputed, refused)]
    largest = finite.max() if finite.numel() else finite.sum()
    own = (bad & seen.scale.isfinite() & seen.bound.isfinite()).sum().double()
    ratio = (finite / seen.bound).nan_to_num(nan=0.0, posinf=UNBOUNDED)
    ratio = ratio.max() if ratio.numel() else ratio.sum()
    rest = torch.stack([torch.where(broken > 0, total, 0.0), own, largest.double(), ratio.double()])
    return torch.cat([torch.stack(actions), kinds, rest])


def _on(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """A number as a float64 tensor on `like`'s device, by a fill and never by a copy from the host."""
    if isinstance(value, torch.Tensor):
        return value.double()
    return torch.full((), float(value), dtype=torch.float64, device=like.device)


class FindingLog:
    """Findings of one rank, slot by slot.

    Args:
        rank: named in every finding.
        recorded: whether slots are replays of a recorded graph, in which nothing is handed over: the checks then write
            where those of the recording wrote.
    """

    def __init__(self, rank: int = 0, *, recorded: bool = False) -> None:
        self.rank = rank
        self._of_graph: list[tuple[int, str, bool, torch.Tensor]] | None = [] if recorded else None
        self._step = self._slot = 0
        self._whole = False
        self._records: list[tuple[int, str, bool, torch.Tensor]] = []
        self._findings: list[dict[str, Any]] = []
        self._seen: defaultdict[int, list[Evidence]] = defaultdict(list)
        self._accepted: set[tuple[int, Place]] = set()
        self.allowance: dict[Place, Allowance] = {}
        """By how much the bounds of sections were widened in this run."""
        self.last: list[dict[str, Any]] = []
        """Findings of the slot that `refused` judged last."""

    def begin(self, step: int, slot: int, *, whole: bool = True) -> None:
        """A slot's computation begins; whole: all of it is looked at. What an earlier one left unread is dropped."""
        if step != self._step:
            self.forget()
        self._step, self._slot, self._whole = step, slot, whole
        self._records = []

    def record(self, layer: int, section: str, vector: torch.Tensor, *, again: bool = False) -> None:
        """Keep one check's `outcome`. again: from a forward that activation checkpointing computes a second
        time."""
        self._records.append((layer, section, again, vector))

    def refused(self) -> bool:
        """Whether this slot has a finding that was not repaired, so that its gradient must not be used.

        One host synchronisation when anything was recorded, none otherwise. Call once, after the backward.
        """
        found, evidence = self._read()
        self.last = found
        self._findings += found
        if evidence or self._whole:
            self._seen[self._slot].append(evidence)
        return bool(evidence)

    def _read(self) -> tuple[list[dict[str, Any]], Evidence]:
        """The records as findings, and what of them refuses the slot."""
        records, self._records = self._records, []
        if self._of_graph is not None and self._whole:
            records = self._of_graph = records or self._of_graph
        if not records:
            return [], ()
        by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
        for i, (_, _, _, vector) in enumerate(records):
            by_device[vector.device].append(i)
        values: dict[int, list[float]] = {}
        for indices in by_device.values():
            stacked = torch.stack([records[i][3] for i in indices]).tolist()
            values.update(zip(indices, stacked, strict=True))
        merged: dict[tuple[int, str], dict[bool, list[float]]] = defaultdict(dict)
        for i, (layer, section, again, _) in enumerate(records):
            if any(values[i][:-_LARGEST]):
                passes = merged[layer, section]
                passes[again] = _merge(passes.get(again), values[i])
        # A finding of the first pass that checkpointing's second pass sees too is one finding. One that only
        # the second pass sees is a fault of its own: that pass feeds the backward.
        found = [
            self._finding(layer, section, passes[min(passes)]) for (layer, section), passes in sorted(merged.items())
        ]
        for finding in found:
            place = finding["layer"], finding["section"]
            if finding["action"] == "refused" and (self._slot, place) in self._accepted:
                finding["action"] = "accepted"
        refusing = [finding for finding in found if finding["action"] == "refused"]
        fields = {place: dict(zip(_FIELDS, passes[min(passes)], strict=True)) for place, passes in merged.items()}
        return found, tuple(self._sighting(f, fields[f["layer"], f["section"]]) for f in refusing)

    def _sighting(self, finding: dict[str, Any], fields: dict[str, float]) -> Sighting:
        place, ratio = (finding["layer"], finding["section"]), fields["ratio"]
        if ratio < UNBOUNDED:
            ratio *= self.allowance.get(place, Allowance()).factor
        return Sighting(*place, finding["kind"], fields["magnitude"], ratio, fields["own"] > 0)

    def seen(self, slot: int) -> list[Evidence]:
        """What each computation of a slot of the present step refused, oldest first; without those that were looked at
        in part, and refused nothing."""
        return list(self._seen.get(slot, []))

    def refusals(self, slot: int) -> list[Evidence]:
        """What every refusal of a slot of the present step on this rank showed, oldest first."""
        return [evidence for evidence in self.seen(slot) if evidence]

    def accept(self, slot: int, evidence: Evidence) -> Evidence:
        """What is not finite in these places refuses this slot of the present step no more; those that are new."""
        new = [s for s in evidence if not s.finite and (slot, s.place) not in self._accepted]
        self._accepted.update((slot, s.place) for s in new)
        return tuple(new)

    def unexplained(self, slot: int) -> list[Evidence]:
        """`seen`, less what bounds that were widened since allow, and what was accepted."""
        return [
            tuple(
                s
                for s in evidence
                if (slot, s.place) not in self._accepted
                and not (s.place in self.allowance and self.allowance[s.place].explains(s))
            )
            for evidence in self.seen(slot)
        ]

    def judged(self, slot: int) -> None:
        """A slot's refusals were judged: what comes is judged anew."""
        self._seen.pop(slot, None)

    def forget(self) -> None:
        """What was seen in the present step was of another state than the one that counts now."""
        self._seen.clear()
        self._accepted.clear()

    def describe(self, slot: int) -> str:
        """Rank, host, slot, and where it was refused each time."""
        times = self.refusals(slot)
        where = "; then ".join(
            ", ".join(f"layer {s.layer} {s.section} ({s.kind})" for s in evidence) for evidence in times
        )
        return (
            f"rank {self.rank} on host {socket.gethostname()} refused slot {slot} of step {self._step} "
            f"{len(times)} times: {where}"
        )

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
    counts = [x + y for x, y in zip(a[:-_LARGEST], b[:-_LARGEST], strict=True)]
    return counts + [max(x, y) for x, y in zip(a[-_LARGEST:], b[-_LARGEST:], strict=True)]
