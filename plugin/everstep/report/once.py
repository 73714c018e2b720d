"""Each commit of a run once, from events that are read while they are written.

Every group logs every commit, and the files of groups on other nodes may be seen late.
"""

from typing import Any

KEPT = 4096
"""No group tells of a commit so many commits late."""


class Commits:
    """Tells a commit's first mention from the others."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}
        """Histories of the last commits, in order."""

    def new(self, event: dict[str, Any]) -> bool:
        """Whether this `commit` event is the first of its commit. Steps that are made again, after a run went back to
        an older state, are commits of other histories."""
        history = event["history"]
        if history in self._told:
            return False
        self._told[history] = None
        if len(self._told) > KEPT:
            del self._told[next(iter(self._told))]
        return True
