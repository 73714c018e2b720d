"""Has a group committed a step since its workers were started, and was anybody else struck meanwhile?

Both are read from what was appended to the run's events since the start, so that it costs the same in the tenth and in
the ten thousandth step.
"""

import os
from pathlib import Path

from everstep.run.events import EventTail, event_path, last_event

COMMIT = b'"kind":"commit"'
STRIKES = ("fault", "lighthouse_died", "workers_stalled", "agent_died", "node_bad")
"""Events that explain why workers end which wait for whom they hit."""


class CommitWatch:
    """Whether a group's rank 0 has committed a step since `restart`."""

    def __init__(self, run_dir: Path, group: int):
        self._path = event_path(run_dir, group, 0, "worker")
        self._offset = 0
        self._seen = False

    def restart(self) -> None:
        """New workers: what is there is of earlier ones."""
        self._seen = False
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def seen(self) -> bool:
        """Whether there is a commit by now. Reads what is new, and nothing once there is one."""
        if self._seen or not self._path.exists():
            return self._seen
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size <= self._offset:
                return False
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._seen = COMMIT in complete
        return self._seen


class StrikeWatch:
    """Who was struck since `restart`: killed, stalled, or broken on purpose."""

    def __init__(self, run_dir: Path, group: int):
        self._group = group
        self._tail = EventTail(run_dir, ("agent-*", "supervisor", "lighthouse", "chaos"))

    def restart(self) -> None:
        self._tail.skip_to_end()

    def struck(self) -> tuple[bool, bool]:
        """Whether, since the last call or `restart`, others were (another group, the lighthouse), and this group."""
        others = own = False
        for event in self._tail.new():
            if event.get("target_group", event.get("group")) == self._group:
                own |= event["kind"] == "fault"
            elif event["kind"] == "workers_died":
                others |= any(code < 0 for code in event.get("exitcodes", {}).values() if isinstance(code, int))
            else:
                others |= event["kind"] in STRIKES
        return others, own


def newest_step(run_dir: Path, groups: int) -> int:
    """The newest step that any group of a run has committed; 0: none."""
    newest = (last_event(event_path(run_dir, group, 0, "worker"), {"commit"}) for group in range(groups))
    return max((event["step"] for event in newest if event is not None), default=0)


def next_incarnation(run_dir: Path, group: int) -> int:
    """0 for a group's first workers in this run directory, then one more each time. Read from the end of the group's
    own log."""
    last = last_event(event_path(run_dir, group, None, "agent"), {"workers_started"})
    return 0 if last is None else last["incarnation"] + 1
