"""The three numbers by which runs that fail are compared, and where the rest of the time went.

ETTR: A. Kokolis and others, Revisiting Reliability in Large-Scale Machine Learning Research Clusters (2024).
Goodput and badput by cause: Google, ML Productivity Goodput (the ml-goodput-measurement library). Throughput kept: what
the step rate is over that of the run without failures. All are between 0 and 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.report.lineage import Commit
from everstep.report.sessions import Session, commits_by_session
from everstep.report.times import STATES, Stretch

CAUSES = (*(state for state in STATES if state != "productive"), "lost", "idle")
"""Of badput: the states of `times.STATES`. `lost`: steps that a restore took back. `idle`: allocated and not there."""


def productive_s(final: Sequence[Commit], runs: Sequence[Session], step_s: float | None) -> float | None:
    """Seconds that the steps of the final state need at a healthy step's pace, of each session no more than it trained.

    None without a healthy step to compare with.
    """
    if step_s is None:
        return None
    made = zip(runs, commits_by_session(runs, final), strict=True)
    return sum(min(run.training_s, step_s * len(commits)) for run, commits in made)


def productivity(
    final: Sequence[Commit],
    dropped: int,
    runs: Sequence[Session],
    by_group: Mapping[int, Sequence[Stretch]],
    step_s: float | None,
    groups: int | None,
) -> dict[str, Any]:
    """`ettr`, `goodput`, `throughput_kept`, and `badput`, the share of the allocated time by cause; None where the
    events cannot tell.

    dropped: commits that are not in the final state. groups: as asked for; None: those that were seen.
    """
    useful_s = productive_s(final, runs, step_s)
    wall_s, training_s = sum(run.end - run.begin for run in runs), sum(run.training_s for run in runs)
    spent = badput_s(final, dropped, runs, by_group, groups or len(by_group))
    allocated_s = sum(spent.values())
    return {
        "ettr": _share(useful_s, wall_s),
        "goodput": _share(spent["productive"], allocated_s),
        "throughput_kept": _share(useful_s, training_s),
        "badput": {cause: _share(spent[cause], allocated_s) for cause in CAUSES} if allocated_s else {},
    }


def badput_s(
    final: Sequence[Commit],
    dropped: int,
    runs: Sequence[Session],
    by_group: Mapping[int, Sequence[Stretch]],
    groups: int,
) -> dict[str, float]:
    """Allocated group-seconds, productive ones and those of each cause: together groups times the sessions' lengths."""
    spent = dict.fromkeys(("productive", *CAUSES), 0.0)
    for parts in by_group.values():
        for part in parts:
            spent[part.state] += part.end - part.begin
    steps = len(final) + dropped
    if steps:
        spent["lost"] = spent["productive"] * dropped / steps
        spent["productive"] -= spent["lost"]
    allocated = max(groups, len(by_group)) * sum(run.end - run.begin for run in runs)
    spent["idle"] = max(0.0, allocated - sum(spent.values()))
    return spent


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else min(1.0, max(0.0, part / whole))
