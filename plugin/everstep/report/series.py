"""What the page draws, as numbers: a run's curves and what its groups did, small enough for a browser."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from everstep.report.lineage import Commit
from everstep.report.times import STATES, Stretch

MOST_POINTS = 1500
LANE_COLUMNS, MOST_COLUMNS = 600, 6_000
"""Columns of a lane, and of all lanes together."""

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
    found["validation"] = dict(validations)
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


def lanes(by_group: Mapping[int, Sequence[Stretch]]) -> dict[str, Any]:
    """`seconds` from the first moment to the last, `columns`, and by group its `bars`: first column, end column, and
    the share of each state in them, in the order of STATES. Columns that are alike are one bar."""
    begin = min((parts[0].begin for parts in by_group.values() if parts), default=0.0)
    end = max((part.end for parts in by_group.values() for part in parts), default=begin)
    end = max(end, begin + 1.0)
    columns = min(LANE_COLUMNS, MOST_COLUMNS // max(1, len(by_group)))
    bars = {}
    for group, parts in sorted(by_group.items()):
        found = shares(parts, begin, end, columns).T.round(3)
        new = np.flatnonzero(np.any(found != np.roll(found, 1, axis=0), axis=1))
        starts = sorted({0, *new.tolist()})
        bars[group] = [
            [first, last, *found[first].tolist()]
            for first, last in zip(starts, [*starts[1:], columns], strict=True)
            if found[first].any()
        ]
    return {"seconds": end - begin, "columns": columns, "bars": bars}


def shares(parts: Sequence[Stretch], begin: float, end: float, columns: int) -> np.ndarray:
    """(states, columns), in the order of STATES: which share of a column's time a group was in each state.
    Nothing is left out, however short."""
    edges = np.linspace(begin, end, columns + 1)
    times = np.array([(part.begin, part.end) for part in parts]).reshape(-1, 2)
    states = np.array([STATES.index(part.state) for part in parts], dtype=int)
    found = np.zeros((len(STATES), columns))
    for row in np.unique(states):
        mine = times[states == row]
        # Time spent in the state until each edge: it grows within stretches only, and in proportion.
        grown = np.stack([np.zeros(len(mine)), mine[:, 1] - mine[:, 0]], axis=1)
        found[row] = np.diff(np.interp(edges, mine.ravel(), grown.ravel().cumsum())) / (edges[1] - edges[0])
    return found.clip(0, 1)
