"""The three numbers by which runs that fail are compared, and where the rest of the time went.

ETTR: A. Kokolis and others, Revisiting Reliability in Large-Scale Machine Learning Research Clusters (2024).
Goodput and badput by cause: Google, ML Productivity Goodput (the ml-goodput-measurement library). Throughput kept: what
the step rate is over that of the run without failures. All are between 0 and 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.report.account import Account
from everstep.report.lineage import Commit
from everstep.report.times import STATES

CAUSES = (*(state for state in STATES if state != "productive"), "lost", "idle")
"""Of badput: the states of `times.STATES`. `lost`: steps that a restore took back. `idle`: allocated and not there."""


def productivity(
    account: Account, final: Sequence[Commit], step_s: float | None, by_group: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """`ettr`, `goodput`, `throughput_kept`, and `badput`, the share of the allocated time by cause; None where the
    events cannot tell.

    step_s: a healthy step's. by_group: seconds of each group in each state.
    """
    useful_s = None
    if step_s is not None:  # the steps of the final state at that pace, of each session no more than it trained
        made = zip(account.sessions, account.commits_of(final), strict=True)
        useful_s = sum(min(session.training_s, step_s * len(commits)) for session, commits in made)
    wall_s = sum(session.wall_s for session in account.sessions)
    spent = dict.fromkeys(("productive", *CAUSES), 0.0)
    for times in by_group.values():
        for state, seconds in times.items():
            spent[state] += seconds
    if commits := len(account.lineage.commits):
        spent["lost"] = spent["productive"] * (commits - len(final)) / commits
        spent["productive"] -= spent["lost"]
    allocated_s = max(account.groups, len(by_group)) * wall_s
    spent["idle"] = max(0.0, allocated_s - sum(spent.values()))
    allocated_s = sum(spent.values())
    return {
        "ettr": _share(useful_s, wall_s),
        "goodput": _share(spent["productive"], allocated_s),
        "throughput_kept": _share(useful_s, sum(session.training_s for session in account.sessions)),
        "badput": {cause: _share(spent[cause], allocated_s) for cause in CAUSES} if allocated_s else {},
    }


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else min(1.0, max(0.0, part / whole))
