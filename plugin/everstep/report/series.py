"""The curves of a run as numbers, few enough for a browser."""

import math
from collections.abc import Iterable, Mapping

from everstep.report.lineage import Commit

MOST_POINTS = 1500

Points = list[tuple[int, float | None]]
"""(step, value); None for a value that is not finite."""


def curves(final: Iterable[Commit], validations: Mapping[int, float]) -> dict[str, Points]:
    """By name, each curve of a run's final state that has points. Seconds a step and tokens per second go from one
    commit to the next, so they have none for a step before which the run was down or went back."""
    found: dict[str, dict[int, float]] = {
        name: {} for name in ("loss", "tokens per second", "MFU, %", "seconds a step", "gradient norm", "learning rate")
    }
    before: Commit | None = None
    for commit in final:
        gap_s = commit.t - before.t if before is not None and commit.parent is before and commit.continued else 0.0
        values = {
            "loss": commit.loss,
            "tokens per second": commit.tokens / gap_s if gap_s > 0 else None,
            "MFU, %": commit.mfu,
            "seconds a step": gap_s if gap_s > 0 else None,
            "gradient norm": commit.grad_norm,
            "learning rate": commit.lr,
        }
        for name, value in values.items():
            if value is not None:
                found[name][commit.step] = value
        before = commit
    found["validation loss"] = dict(validations)
    return {name: thinned(points) for name, points in found.items() if points}


def thinned(points: Mapping[int, float]) -> Points:
    """At most MOST_POINTS points: of each stretch of steps its lowest and its highest, in order."""
    steps = sorted(points)
    if len(steps) > MOST_POINTS:
        size = -(-2 * len(steps) // MOST_POINTS)
        kept: list[int] = []
        for first in range(0, len(steps), size):
            part = steps[first : first + size]
            kept += sorted({min(part, key=points.__getitem__), max(part, key=points.__getitem__)})
        steps = kept
    return [(step, float(f"{points[step]:.6g}") if math.isfinite(points[step]) else None) for step in steps]
