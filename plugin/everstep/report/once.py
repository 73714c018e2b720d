"""Each commit of a run once, from events that are read while they are written.

Every group logs every commit, and the files of groups on other nodes may be seen late. `report.lineage` decides the
same afterwards, with all events at hand.
"""

from typing import Any

KEPT_STEPS = 4096
"""No group tells of a commit so many steps late; what is older is a new commit of a run that went back."""


class Commits:
    """Tells a commit's first mention from the others."""

    def __init__(self) -> None:
        self._newest = 0
        self._told: dict[int, tuple[tuple[Any, ...], set[int]]] = {}
        """By step: what tells this commit from another of the same step, and the groups that have told of it."""

    def new(self, event: dict[str, Any]) -> bool:
        """Whether this `commit` event is the first of its commit.

        A step that is not above the last new one then means that the run went back: a checkpoint was loaded, or the
        only group that had committed the step is gone.
        """
        step, group = event["step"], event["group"]
        which = (tuple(event["groups"]), event.get("quorum_id"))
        told = self._told.get(step)
        if told is not None and told[0] == which and group not in told[1]:
            told[1].add(group)
            return False
        if step <= self._newest:
            self._told = {earlier: said for earlier, said in self._told.items() if earlier < step}
        self._newest = step
        self._told[step] = which, {group}
        self._told.pop(step - KEPT_STEPS, None)
        return True
