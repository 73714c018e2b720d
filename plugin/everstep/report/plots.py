"""The plots of a report, as SVG that stands in a page: text and axes take the page's colour, light or dark."""

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from everstep.report.times import Stretch

INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
MINE, REFERENCE, FAULT = "#2a7de1", "#e8963a", "#d64550"
STATE_COLOURS = {
    "productive": "#3aa76d",
    "recomputed": "#8fce5a",
    "stalled": "#d64550",
    "healing": "#9a6ad6",
    "restarting": "#e8963a",
    "waiting": "#8a94a3",
}
MOST_POINTS = 1500
SMALLEST_SHARE = 1 / 1500
"""Stretches shorter than this share of the run are not drawn on their own."""

plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "everstep",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
)


def loss(mine: Mapping[int, float], reference: Mapping[int, float], faults: Sequence[int]) -> str:
    """Loss against committed step, the run to compare with beneath it, a mark at each step with a fault."""
    axes = _axes(3.2)
    if reference:
        axes.plot(*_thinned(reference), color=REFERENCE, linewidth=4, alpha=0.55, label="nothing failed")
    axes.plot(*_thinned(mine), color=MINE, linewidth=1.4, label="this run")
    _mark(axes, faults)
    axes.set(xlabel="committed step", ylabel="loss")
    axes.legend(loc="upper right")
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


def lanes(by_group: Mapping[int, Sequence[Stretch]], begin: float) -> str:
    """Each group's states over time."""
    axes = _axes(0.9 + 0.34 * max(1, len(by_group)))
    end = max((part.end for parts in by_group.values() for part in parts), default=begin + 1)
    for row, (_, parts) in enumerate(sorted(by_group.items())):
        for state, colour in STATE_COLOURS.items():
            bars = [(p.begin - begin, p.end - p.begin) for p in _merged(parts, end - begin) if p.state == state]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(by_group)), [f"group {group}" for group in sorted(by_group)])
    axes.set_xlim(0, end - begin)
    axes.invert_yaxis()
    axes.set(xlabel="seconds since the start")
    handles = [Patch(color=colour, label=state) for state, colour in STATE_COLOURS.items()]
    axes.legend(handles=handles, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8.5)
    return _svg(axes)


def distribution(values: Sequence[float], what: str) -> str:
    """How often a fault cost so many seconds."""
    axes = _axes(2.2, width=4.2)
    axes.hist(values, bins=min(30, max(5, len(values) // 3)), color=MINE)
    axes.set(xlabel=f"{what}, seconds", ylabel="faults")
    return _svg(axes)


def _axes(height: float, width: float = 8.4) -> Axes:
    return plt.subplots(figsize=(width, height))[1]


def _mark(axes: Axes, steps: Sequence[int]) -> None:
    if steps:
        axes.plot(sorted(set(steps)), [0.0] * len(set(steps)), "|", color=FAULT, markersize=9, clip_on=False,
                  transform=axes.get_xaxis_transform(), label="fault")  # fmt: skip


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


def _merged(parts: Sequence[Stretch], whole_s: float) -> list[Stretch]:
    """Neighbours of one state as one; what is too short to be seen goes with the state before it."""
    found: list[Stretch] = []
    for part in parts:
        short = part.end - part.begin < whole_s * SMALLEST_SHARE
        if found and found[-1].end == part.begin and (short or found[-1].state == part.state):
            found[-1] = Stretch(found[-1].begin, part.end, found[-1].state)
        else:
            found.append(part)
    return found


def _svg(axes: Axes) -> str:
    figure = axes.get_figure(root=True)
    assert figure is not None
    sink = io.StringIO()
    figure.savefig(sink, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = sink.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # The page says how wide it is; the coordinates stay.
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )
