"""The plots of a report, as SVG that stands in a page: text and axes take the page's colour, light or dark."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from everstep.report.times import STATES, Stretch

INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
MINE, REFERENCE, FAULT, VALIDATION = "#2a7de1", "#9cc8f5", "#8a4fd3", "#d98200"
"""Of curves and of the marks on them: none is a state's."""
UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
STATE_COLOURS = {
    "productive": "#009e73",
    "recomputed": "#f0e442",
    "stalled": "#d55e00",
    "healing": "#cc79a7",
    "start-up": "#9d7bd8",
    "restarting": "#56b4e9",
    "waiting": "#8a94a3",
}
"""Told apart by every kind of colour blindness: Okabe and Ito, Color Universal Design (2008)."""
MOST_POINTS = 1500
HALF = 4.2
"""Width in inches of a plot that has another one beside it."""
LANE_COLUMNS, MOST_COLUMNS = 600, 6_000
"""Columns of a lane, and of all lanes together."""

_number = itertools.count()

plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def loss(
    mine: Mapping[int, float],
    reference: Mapping[int, float],
    validation: Mapping[int, float],
    faults: Sequence[int],
) -> str:
    """Loss against committed step, the run to compare with beneath it, a dot for each validation, a mark at each step
    with a fault."""
    axes = _axes(3.2)
    axes.plot(*_thinned(reference), color=REFERENCE, linewidth=4)
    axes.plot(*_thinned(mine), color=MINE, linewidth=1.4)
    axes.plot(*_thinned(validation), "o", color=VALIDATION, markersize=4, markeredgewidth=0)
    _mark(axes, faults)
    axes.set(xlabel="committed step", ylabel="loss")
    return _svg(axes)


def step_times(by_step: Mapping[int, float], usual: float | None, faults: Sequence[int]) -> str:
    """Seconds from each commit to the next."""
    axes = _axes(2.4)
    axes.plot(*_thinned(by_step), color=MINE, linewidth=1.0)
    if usual is not None:
        axes.axhline(usual, color=INK, linewidth=0.7, linestyle=":")
    _mark(axes, faults)
    axes.set(xlabel="committed step", ylabel="seconds a step")
    axes.set_ylim(bottom=0)
    return _svg(axes)


def curve(by_step: Mapping[int, float], label: str) -> str:
    """Any figure against committed step."""
    axes = _axes(1.9)
    axes.plot(*_thinned(by_step), color=MINE, linewidth=1.0)
    axes.set(xlabel="committed step", ylabel=label)
    return _svg(axes)


def dots(values: Sequence[float], what: str) -> str:
    """Values on one line, each a dot."""
    axes = _axes(1.1, HALF)
    axes.plot(values, [0.0] * len(values), "o", color=MINE, alpha=0.4, markersize=7, markeredgewidth=0)
    axes.set(xlabel=f"{what}, seconds", yticks=[], ylim=(-1, 1))
    axes.set_xlim(left=min(0.0, *values))
    axes.spines["left"].set_visible(False)
    return _svg(axes)


def lanes(by_group: Mapping[int, Sequence[Stretch]], begin: float) -> str:
    """Each group's states over time: a column's height is shared as its time was. Empty where a group was not there."""
    axes = _axes(0.6 + 0.34 * max(1, len(by_group)))
    end = max((part.end for parts in by_group.values() for part in parts), default=begin)
    end = max(end, begin + 1.0)
    unit_s, unit = next((size, name) for size, name in UNITS if end - begin >= 3 * size or size == 1)
    columns = min(LANE_COLUMNS, MOST_COLUMNS // max(1, len(by_group)))
    edges = np.linspace(0, (end - begin) / unit_s, columns + 1)
    for row, (_, parts) in enumerate(sorted(by_group.items())):
        top = np.zeros(columns)
        for state, share in zip(STATES, shares(parts, begin, end, columns), strict=True):
            low = np.where(share > 0, row + 0.4 - 0.8 * top, row)
            high = np.where(share > 0, low - 0.8 * share, row)
            if share.any():
                _steps(axes, edges, low, high, STATE_COLOURS[state])
            top += share
    axes.set_yticks(range(len(by_group)), [f"group {group}" for group in sorted(by_group)])
    axes.set_xlim(0, edges[-1])
    axes.invert_yaxis()
    axes.set(xlabel=f"{unit} since the start")
    return _svg(axes)


def _steps(axes: Axes, edges: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str) -> None:
    """Fill each column between `low` and `high`; columns like their left neighbour need no points of their own."""
    new = np.flatnonzero(np.diff(low, prepend=np.nan).astype(bool) | np.diff(high, prepend=np.nan).astype(bool))
    at = np.append(edges[new], edges[-1])
    bottom, top = (np.append(values[new], values[-1]) for values in (low, high))
    axes.fill_between(at, bottom, top, step="post", color=colour, linewidth=0)


def shares(parts: Sequence[Stretch], begin: float, end: float, columns: int) -> np.ndarray:
    """(states, columns), in the order of STATES: which share of a column's time a group was in each state.
    Nothing is left out, however short."""
    edges = np.linspace(begin, end, columns + 1)
    found = np.zeros((len(STATES), columns))
    for row, state in enumerate(STATES):
        mine = [part for part in parts if part.state == state]
        if not mine:
            continue
        # Time spent in the state until each edge: it grows within stretches only, and in proportion.
        times = np.array([[part.begin, part.end] for part in mine]).ravel()
        spent = np.cumsum([size for part in mine for size in (0.0, part.end - part.begin)])
        found[row] = np.diff(np.interp(edges, times, spent)) / (edges[1] - edges[0])
    return found.clip(0, 1)


def _axes(height: float, width: float = 2 * HALF) -> Axes:
    return plt.subplots(figsize=(width, height))[1]


def _mark(axes: Axes, steps: Sequence[int]) -> None:
    if steps:
        axes.plot(sorted(set(steps)), [0.0] * len(set(steps)), "|", color=FAULT, markersize=14, markeredgewidth=1.6,
                  clip_on=False, transform=axes.get_xaxis_transform())  # fmt: skip


def _thinned(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """At most MOST_POINTS points: of each stretch of steps its lowest and its highest, in order."""
    steps = sorted(points)
    if len(steps) > MOST_POINTS:
        size = -(-2 * len(steps) // MOST_POINTS)
        kept: list[int] = []
        for first in range(0, len(steps), size):
            part = steps[first : first + size]
            kept += sorted({min(part, key=points.__getitem__), max(part, key=points.__getitem__)})
        steps = kept
    return steps, [points[step] for step in steps]


def _svg(axes: Axes) -> str:
    figure = axes.get_figure(root=True)
    assert figure is not None
    sink = io.StringIO()
    # What other plots of the page refer to must not be taken from this one, which may be hidden.
    plt.rcParams["svg.hashsalt"] = f"everstep {next(_number)}"
    figure.savefig(sink, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = sink.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # each plot has an axes_1
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    # The page says how wide it is; the coordinates stay.
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
