"""A group's connection to the run's lighthouse, through its gate (`everstep.quorum.gate`): heartbeats and requests.

Only rank 0 of a group has one; the other ranks learn from rank 0. What a group says of itself travels with its request
and comes back in the quorum, so a quorum for an earlier request is recognised.

The lighthouse's host may fall silent, and the lighthouse may restart at another address. So each heartbeat reads the
published address, and waits for half a heartbeat timeout. If the lighthouse has moved or was silent for a whole
heartbeat timeout, the heartbeat thread ends the request that waits for it, which is then made at the new address.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from pydantic import Field

from everstep import wire
from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.request import Request, decode, encode, name_of, read_quorum

PURPOSE = "lighthouse"
HEARTBEAT_S, HEARTBEATS = 0.5, 4
"""Longest time between two heartbeats in seconds, and the fewest heartbeats within one heartbeat timeout."""
ASK_AGAIN_S, LONGEST_S = 0.1, 86400.0
SPARE = 0.05
"""Fraction of a request's timeout by which the gate gives up earlier, so that its reason reaches the group in time."""


@dataclass(frozen=True)
class GateMessage:
    """A message to the gate. Without `said` it is a heartbeat; `makes` is `Quorum.makers_word` of the quorum in which
    the group makes steps, empty for none. With `said`, the encoded `Request`, it asks for the next quorum."""

    replica: str
    said: str = ""
    timeout_s: Annotated[float, Field(ge=0.001, le=LONGEST_S)] = 1.0
    makes: str = ""


class GateConnection:
    """One thread's connection to the lighthouse, made anew after every failure and for every new address.

    Args:
        token: the run's token.
        connect_timeout: longest time to connect.
    """

    def __init__(self, token: bytes, connect_timeout: timedelta) -> None:
        self._token, self._connect_timeout = token, connect_timeout
        self._lock = threading.Lock()
        self._channel: wire.Channel | None = None
        self.address = ""
        """`http://host:port` of the lighthouse that is asked now or was asked last."""

    def ask(self, address: str, message: GateMessage, timeout: timedelta) -> dict[str, Any]:
        """Send a message to the lighthouse at `address` and return the answer. Raises WireError."""
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
        """Close the connection. A request that another thread has made on it fails."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.cut()


class Membership:
    """Asks for quorums for one group, and sends the lighthouse heartbeats from a thread.

    Args:
        group: group id.
        life: name of this start of the group; another one after every restart.
        token: the run's token.
        find_lighthouse: returns the lighthouse's present address, `http://host:port`; "" if there is none.
        fenced: whether another start of this group has replaced this one. Then the heartbeats stop, because a gate that
            hears both cannot know which is the newer.
        heartbeat_timeout_s: silence after which the lighthouse takes a group for dead.
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
        self._timeout = timedelta(seconds=heartbeat_timeout_s / 2)
        self._asking, self._beating = GateConnection(token, self._timeout), GateConnection(token, self._timeout)
        self.wanted = False
        """Whether another group waits for a quorum, or makes steps in another one, as the last heartbeat was told."""
        self._makes = ""
        self._left = threading.Event()
        threading.Thread(target=self._keep_beating, name="lighthouse-heartbeat", daemon=True).start()

    def _published(self) -> str:
        return self._find_lighthouse() or self._asking.address  # the last one, if the file cannot be read just now

    def ask(self, request: Request, timeout: timedelta) -> tuple[int, list[Request]]:
        """Return torchft's id of the next quorum and its members' requests. Raises QuorumUnavailable if none came in
        time, or the one that came is not for this request."""
        patience_s = min(timeout.total_seconds(), LONGEST_S)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._ask_once(request, max(deadline - time.monotonic(), 0.01))
            except QuorumUnavailable:
                # Retried, as the lighthouse may be restarting, while there is time left for an answer with a reason.
                if time.monotonic() > deadline - SPARE * patience_s or self._left.wait(ASK_AGAIN_S):
                    raise

    def _ask_once(self, request: Request, timeout_s: float) -> tuple[int, list[Request]]:
        asked = GateMessage(self._replica, encode(request), (1 - SPARE) * timeout_s)
        address = self._published()
        try:
            answer = self._asking.ask(address, asked, timedelta(seconds=timeout_s))
            if "failed" in answer:
                raise QuorumUnavailable(str(answer["failed"]))
            members = answer["members"]
            if not isinstance(members, list) or not isinstance(answer["quorum_id"], int):
                raise ValueError("the lighthouse's answer is malformed")
            found = answer["quorum_id"], [decode(member) for member in members]
            quorum = read_quorum(*found)
            if request not in found[1]:
                raise ValueError("the quorum is for another request of this group")
        except (wire.WireError, KeyError, ValueError) as error:
            raise QuorumUnavailable(str(error).partition("\n")[0][:300]) from error
        if self._published() != address:
            # The other groups ask the new one. This quorum consists of groups that have not noticed that yet.
            raise QuorumUnavailable("the lighthouse has moved to another address")
        self.wanted, self._makes = False, quorum.makers_word() if request.group in quorum.able else ""
        return found

    def _keep_beating(self) -> None:
        """Send heartbeats, in their own thread: they stop when the process ends, and while it is stopped."""
        heard = time.monotonic()
        while not self._left.wait(self._every_s):
            if self._fenced():
                self._left.set()
                break
            address = self._published()
            try:
                beat = GateMessage(self._replica, makes=self._makes)
                self.wanted = self._beating.ask(address, beat, self._timeout).get("wanted") is True
                heard = time.monotonic()
            except wire.WireError:  # the next heartbeat says it again; no group waits at a lighthouse that is away
                self.wanted = False
            if self._asking.address not in ("", address) or time.monotonic() - heard > self._timeout_s:
                self._asking.end()
        self._beating.end()
        self._asking.end()

    def leave(self) -> None:
        """Stop the heartbeats and close the connections, as the death of the process would: the other groups go on
        without this one."""
        self._left.set()
