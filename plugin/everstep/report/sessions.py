"""When a run ran and how it ended."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.report.lineage import Commit


@dataclass(slots=True, frozen=True)
class Session:
    """One start of a run: one that was stopped and started again in the same directory has several."""

    begin: float
    """Wall time in seconds of its first event."""
    end: float
    training_s: float
    """From the first training_started to the last training_done, without one to the end. 0: never began."""

    def __contains__(self, t: float) -> bool:
        return self.begin <= t <= self.end


def collect_sessions(events: Iterable[dict[str, Any]]) -> list[Session]:
    """The sessions of a run from its events in order of time.

    A session begins with run_started and ends with run_ended, or with its last event when there was nobody
    left to write one. Without a supervisor all events are one session.
    """
    parts: list[dict[str, float]] = []
    seen_start = False
    for event in events:
        kind, t = event["kind"], event["t"]
        if not parts or (kind == "run_started" and seen_start):
            parts.append({"begin": t})
        seen_start |= kind == "run_started"
        part = parts[-1]
        part["last"] = t
        if kind == "training_started":
            part.setdefault("training", t)
        elif kind in ("run_ended", "training_done"):
            part[kind] = t
    found = []
    for part in parts:
        end = part.get("run_ended", part["last"])
        training_s = max(0.0, part.get("training_done", end) - part.get("training", end))
        found.append(Session(part["begin"], end, training_s))
    return found


def commits_by_session(runs: Sequence[Session], commits: Iterable[Commit]) -> list[list[Commit]]:
    """The commits made in each session, each list in order of time."""
    ordered = sorted(commits, key=lambda commit: commit.t)
    return [[commit for commit in ordered if commit.t in run] for run in runs]


def ending(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """`status` and `reason` of a run.

    They are the last run_ended's, unless another start followed it: then, and when there is none, the status
    is "running", which a supervisor that was killed leaves behind too. Of a run without a supervisor, the
    workers' training_done says that it is "done".
    """
    state: dict[str, Any] = {}
    done = False
    for event in events:
        if event["kind"] in ("run_started", "run_ended"):
            state = event
        done |= event["kind"] == "training_done"
    if state.get("kind") == "run_ended":
        return {"status": state.get("status"), "reason": state.get("reason")}
    return {"status": "done" if done and not state else "running", "reason": None}


def stated(events: Iterable[dict[str, Any]], field: str, *kinds: str) -> Any:
    """The last value of `field` in events of these kinds; None when none carries it."""
    found = None
    for event in events:
        if event["kind"] in kinds:
            found = event.get(field, found)
    return found


def groups_mean(by_session: Iterable[Sequence[Commit]]) -> float | None:
    """Groups that took part in a commit, weighted by the time since the commit before; for the first commit
    of a session by the step's own duration."""
    weighted = total = 0.0
    for commits in by_session:
        previous = None
        for commit in commits:
            weight = commit.took_s or 0.0 if previous is None else commit.t - previous
            weighted += weight * len(commit.groups)
            total += weight
            previous = commit.t
    return weighted / total if total else None
