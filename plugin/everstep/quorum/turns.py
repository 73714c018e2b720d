"""Which groups may ask torchft's lighthouse now: the members of the last quorum that make a step come first.

The lighthouse makes a new quorum as soon as all members of the last one ask, and else when more than half of the groups
ask and one of them has waited for the join timeout (torchft, src/lighthouse.rs, `quorum_compute`). A group that comes
back while the others make a step has waited for longer than that when they ask again. With it and the first of them
there is a majority, and a quorum without the others, who ask a millisecond later: of three groups one is then left out
of each step, another one each time, and heals. The same would happen with a member of the last quorum that makes no
step, because it has no state or cannot be reached: it asks again at once. So groups that make no step wait at the gate,
where their time does not count, until one asks that does, or none of those is heard any more.
"""

from collections.abc import Callable, Iterable

LOOK_S = 0.25
"""How often to see whether those that others wait for have died."""
HEAD_START_S = 0.02
"""For the requests that waited for their turn, before that which gave it to them."""


class Turns:
    """Decides whether a replica's request may go on.

    Args:
        is_heard: whether a replica's heartbeats come.
    """

    def __init__(self, is_heard: Callable[[str], bool]) -> None:
        self._is_heard = is_heard
        self._makers: frozenset[str] = frozenset()
        """Members of the last quorum that make its step; empty once one of them has asked again."""

    def asked(self, replica: str) -> None:
        """A replica asks for a quorum."""
        if replica in self._makers:
            self._makers = frozenset()

    def formed(self, makers: Iterable[str]) -> None:
        """There is a new quorum, of whose members these make its step."""
        self._makers = frozenset(makers)

    def may_pass(self) -> bool:
        """Whether those that make no step may ask."""
        return not any(self._is_heard(maker) for maker in self._makers)
