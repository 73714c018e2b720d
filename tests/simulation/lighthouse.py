"""torchft 0.2.0's lighthouse in Python: the rules of src/lighthouse.rs, at times that the caller passes in, without
`shrink_only` and commit failures, which no client here sends. `test_lighthouse.py` compares it with the real one."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    min_replicas: int
    join_timeout_s: float
    heartbeat_timeout_s: float
    quorum_tick_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Announced:
    """A quorum: its id, and its members' replica ids, sorted."""

    id: int
    members: tuple[str, ...]


@dataclass(slots=True)
class Listener:
    """A request whose client still waits for the answer."""

    replica_id: str
    answer: Callable[[Announced], None]


class Lighthouse:
    """State and rules; times are seconds on the caller's clock."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.heartbeats: dict[str, float] = {}
        self.participants: dict[str, float] = {}
        """Replica id -> time of its request. A request stays after its client has given up."""
        self.previous: tuple[str, ...] | None = None
        self.quorum_id = 0
        self._listeners: list[Listener] = []

    def heartbeat(self, now: float, replica_id: str) -> None:
        self.heartbeats[replica_id] = now

    def ask(self, now: float, replica_id: str, answer: Callable[[Announced], None]) -> Listener:
        """Take a request. It counts as a heartbeat, and may form a quorum at once."""
        self.heartbeats[replica_id] = now
        self.participants[replica_id] = now
        listener = Listener(replica_id, answer)
        self._listeners.append(listener)
        self.tick(now)
        return listener

    def cancel(self, listener: Listener) -> None:
        """Forget a client that waits no longer. Its request stays."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def healthy(self, now: float) -> set[str]:
        return {name for name, last in self.heartbeats.items() if now - last < self.options.heartbeat_timeout_s}

    def compute(self, now: float) -> list[str] | None:
        """Return the members of the quorum that can form now, or None if none can."""
        healthy = self.healthy(now)
        asking = sorted(name for name in self.participants if name in healthy)
        if self.previous is not None and all(name in asking for name in self.previous):
            return asking  # a fast quorum
        if len(asking) < self.options.min_replicas or len(asking) <= len(healthy) // 2:
            return None
        first = min((self.participants[name] for name in asking), default=now)
        if len(asking) != len(healthy) and now - first < self.options.join_timeout_s:
            return None
        return asking

    def tick(self, now: float) -> None:
        """Form a quorum if one can form. The real lighthouse does this every `quorum_tick_s`, and on each request."""
        members = self.compute(now)
        if members is None:
            return
        if self.previous != tuple(members):
            self.quorum_id += 1
        self.previous = tuple(members)
        quorum = Announced(self.quorum_id, self.previous)
        self.participants.clear()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            if listener.replica_id in members:
                listener.answer(quorum)
            else:  # the quorum is without this one, so it asks again
                self.participants[listener.replica_id] = now
                self._listeners.append(listener)

    def next_change(self, now: float) -> float | None:
        """Return when a tick may first form a quorum if no request or heartbeat comes before; None: never."""
        if not self.participants:
            return None
        joined = [when + self.options.join_timeout_s for when in self.participants.values()]
        expiring = [last + self.options.heartbeat_timeout_s for last in self.heartbeats.values()]
        times = [when for when in joined + expiring if when > now]
        return min(times, default=None)
