"""A group's voice at the run's lighthouse, behind its gate (`everstep.quorum.gate`).

Only rank 0 of a group has one; the other ranks learn from it. What a group says of itself travels with its request and
comes back in the quorum, so a quorum that is not for the newest request is recognised.

The lighthouse's host may fall silent, and another one be published. So heartbeats read the published address each time,
and wait for half a heartbeat timeout; where they find that the lighthouse has moved, or that it has been silent for a
whole one, they end the request that waits for it, which is then made at the new address.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any

from everstep import wire
from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.request import Request, decode, encode, name_of, read_quorum
from everstep.run import typed

PURPOSE = "lighthouse"
HEARTBEAT_S, HEARTBEATS = 0.5, 4
"""The longest time between two heartbeats, and how many missed in a row make a group count as lost."""
ASK_AGAIN_S, LONGEST_S = 0.1, 86400.0
SPARE = 0.05
"""Of a group's patience: what the lighthouse waits less, so that its reason arrives before the group gives up."""


@dataclass(frozen=True)
class Asked:
    """A member lives and makes the steps of a quorum (`Quorum.makers`; empty: of none); or with `said`, what it says of
    itself, it asks for the next one."""

    replica: str
    said: str = ""
    timeout_s: Annotated[float, typed.Within(0.001, LONGEST_S)] = 1.0
    makes: str = ""


class Line:
    """One thread's connection to the lighthouse, made anew after every failure and for every other address.

    Args:
        token: of the run.
        connect_timeout: for a connection.
    """

    def __init__(self, token: bytes, connect_timeout: timedelta) -> None:
        self._token, self._connect_timeout = token, connect_timeout
        self._lock = threading.Lock()
        self._channel: wire.Channel | None = None
        self.address = ""
        """Of the lighthouse that is asked now or was asked last, `http://host:port`."""

    def ask(self, address: str, message: dict[str, Any], timeout: timedelta) -> dict[str, Any]:
        """The answer to a message. Raises WireError."""
        try:
            channel = self._channel if address == self.address else None
            if channel is None:
                self.end()
                self.address, patience = address, min(timeout, self._connect_timeout)
                channel = wire.connect(address.rstrip("/").rpartition("/")[2], self._token, patience, purpose=PURPOSE)
                with self._lock:
                    self._channel = channel
            channel.set_timeout(timeout)
            return channel.ask(message)
        except wire.WireError:
            self.end()
            raise

    def end(self) -> None:
        """End the connection; what another thread waits for on it fails."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.cut()


class Membership:
    """Joins quorums for one group, and tells the lighthouse that it lives.

    Args:
        group: group id.
        life: differs after every start of the group's workers.
        token: of the run.
        find_lighthouse: gives `http://host:port`, and another one when the lighthouse has moved; "" for none.
        fenced: whether another start of this group counts now: this one is not heard any more then. A gate that hears
            both cannot know which is the newer.
        heartbeat_timeout_s: of the lighthouse.
    """

    def __init__(
        self,
        *,
        group: int,
        life: str,
        token: bytes,
        find_lighthouse: Callable[[], str],
        fenced: Callable[[], bool] = lambda: False,
        heartbeat_timeout_s: float,
    ) -> None:
        self._replica, self._find_lighthouse, self._fenced = name_of(group, life), find_lighthouse, fenced
        self._timeout_s, self._every_s = heartbeat_timeout_s, min(HEARTBEAT_S, heartbeat_timeout_s / HEARTBEATS)
        self._patience = timedelta(seconds=heartbeat_timeout_s / 2)
        self._asking, self._beating = Line(token, self._patience), Line(token, self._patience)
        self.wanted = False
        """Whether somebody else waits for a quorum, or makes steps apart from this group, as the last beat was told."""
        self._makes = ""
        self._left = threading.Event()
        self._beats = threading.Thread(target=self._keep_beating, name="lighthouse-heartbeat", daemon=True)
        self._beats.start()

    def _published(self) -> str:
        return self._find_lighthouse() or self._asking.address  # the file cannot be read at the moment

    def ask(self, request: Request, timeout: timedelta) -> tuple[int, list[Request]]:
        """The next quorum: torchft's id, and what its members say of themselves. Raises QuorumUnavailable: none came in
        time, or what came is not for this request."""
        patience_s = min(timeout.total_seconds(), LONGEST_S)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._ask_once(request, max(deadline - time.monotonic(), 0.001))
            except QuorumUnavailable:
                # A lighthouse that starts again is asked again, while there is time for more than "no answer".
                if time.monotonic() > deadline - max(ASK_AGAIN_S, SPARE * patience_s) or self._left.wait(ASK_AGAIN_S):
                    raise

    def _ask_once(self, request: Request, timeout_s: float) -> tuple[int, list[Request]]:
        asked = Asked(self._replica, encode(request), max(0.001, (1 - SPARE) * timeout_s))
        address = self._published()
        try:
            answer = self._asking.ask(address, asdict(asked), timedelta(seconds=timeout_s))
            if "failed" in answer:
                raise QuorumUnavailable(str(answer["failed"]))
            members = answer["members"]
            if not isinstance(members, list) or not isinstance(answer["quorum_id"], int):
                raise ValueError("a quorum of another form")
            found = answer["quorum_id"], [decode(member) for member in members]
            quorum = read_quorum(*found)
            if request not in found[1]:
                raise ValueError("the quorum is for another request of this group")
        except (wire.WireError, KeyError, ValueError) as error:
            raise QuorumUnavailable(str(error).partition("\n")[0][:300]) from error
        if self._published() != address:
            # The others ask the one that is published now. A quorum of this one would be of those that do not know yet.
            raise QuorumUnavailable("the lighthouse has moved")
        self.wanted, self._makes = False, quorum.makers() if request.group in quorum.able else ""
        return found

    def _keep_beating(self) -> None:
        """Heartbeats, in a thread of their own: they stop with the process, and while it is stopped."""
        heard = time.monotonic()
        while not self._left.wait(self._every_s):
            if self._fenced():
                self._left.set()
                break
            address = self._published()
            try:
                beat = asdict(Asked(self._replica, makes=self._makes))
                self.wanted = self._beating.ask(address, beat, self._patience).get("wanted") is True
                heard = time.monotonic()
            except wire.WireError:  # what is not heard now is said again; nobody waits at a lighthouse that is away
                self.wanted = False
            if self._asking.address not in ("", address) or time.monotonic() - heard > self._timeout_s:
                self._asking.end()
        self._beating.end()
        self._asking.end()

    def leave(self) -> None:
        """End the heartbeats and their connection, as the death of the process would: the others go on without this
        group. Waits for a heartbeat under way."""
        self._left.set()
        self._beats.join(self._timeout_s)
