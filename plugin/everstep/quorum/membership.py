"""A group's voice at torchft's lighthouse.

Only rank 0 of a group has one; the other ranks learn from it. The lighthouse is asked directly: torchft's manager
would go on asking on behalf of a client that has given up, with that client's old step, and would collect votes that
nobody counts any more. What a group says of itself travels in the request's data and comes back in the quorum, so a
quorum that is not for the newest request is seen to be that. Ids and data carry codes of the run's token: a quorum with
a stranger in it is no quorum.
"""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from everstep.quorum.identity import StrangerError, check_saying, read_id, replica_id, saying_code
from everstep.quorum.voice import LighthouseError, Voice
from everstep.step.interfaces import QuorumUnavailable
from everstep.step.quorum import Member, Request, decode, encode

HEARTBEAT_S, HEARTBEATS = 0.25, 4
"""The longest time between two heartbeats, and how many of them must be lost in a row before a group is."""
ASK_AGAIN_S = 0.1
LAST_BEAT_S = 2.0
"""How long a group that leaves waits for a heartbeat under way."""
DATA, CODE = "everstep", "code"


class Membership:
    """Joins quorums for one group, and tells the lighthouse that it lives.

    Args:
        group: group id.
        life: differs after every start of the group's workers.
        token: of the run.
        find_lighthouse: gives `http://host:port`, and another one when the lighthouse has moved.
        connect_timeout: for connections to the lighthouse.
        heartbeat_timeout_s: of the lighthouse.
        gated: whether the address is of the run's own lighthouse; else it may be one of torchft's without a gate.
    """

    def __init__(
        self,
        *,
        group: int,
        life: str,
        token: bytes,
        find_lighthouse: Callable[[], str],
        connect_timeout: timedelta,
        heartbeat_timeout_s: float = 0.8,
        gated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._token, self._replica_id = token, replica_id(token, group, life)
        self._find_lighthouse, self._connect_timeout = find_lighthouse, connect_timeout
        self._asking, self._beating = (Voice(token, self._replica_id, connect_timeout, gated) for _ in range(2))
        self._every_s = min(HEARTBEAT_S, heartbeat_timeout_s / HEARTBEATS)
        self._address = ""
        self._left = threading.Event()
        self._beats = threading.Thread(target=self._keep_beating, name="lighthouse-heartbeat", daemon=True)
        self._beats.start()
        atexit.register(self.leave)

    def follow(self) -> bool:
        """Speak to the lighthouse where it is now. Whether it moved."""
        before, self._address = self._address, self._find_lighthouse()
        return before not in ("", self._address)

    def ask(self, request: Request, timeout: timedelta) -> tuple[int, list[Member]]:
        """See `everstep.step.interfaces.Membership`."""
        deadline = time.monotonic() + timeout.total_seconds()
        reason: QuorumUnavailable | None = None
        while True:
            left_s = deadline - time.monotonic()
            if reason is not None and left_s < ASK_AGAIN_S:  # too little for another reason than that
                raise reason
            try:
                return self._ask_once(request, timedelta(seconds=max(left_s, 0.001)))
            except QuorumUnavailable as error:
                # A lighthouse that starts again is asked again until the time is up.
                reason = error
                if self._left.wait(ASK_AGAIN_S):
                    raise
                self.follow()

    def _ask_once(self, request: Request, timeout: timedelta) -> tuple[int, list[Member]]:
        saying = encode(request)
        try:
            data = {DATA: saying, CODE: saying_code(self._token, self._replica_id, saying)}
            quorum_id, told = self._asking.quorum(self._address, request.store, request.step, data, timeout)
            return quorum_id, [self._read(replica, said) for replica, said in told]
        except (LighthouseError, ValueError) as error:
            raise QuorumUnavailable(str(error)) from error

    def _read(self, replica: object, data: object) -> Member:
        """A member, by what it says of itself. Raises ValueError if it is none of this run's, or says nonsense."""
        if not isinstance(replica, str) or not isinstance(data, dict):
            raise StrangerError("the lighthouse names a member that is none")
        group, life = read_id(self._token, replica)
        member = decode(check_saying(self._token, replica, data.get(DATA), data.get(CODE)))
        if (member.group, member.life) != (group, life):
            raise StrangerError(f"replica {ascii(replica)[:80]} speaks for another one")
        return member

    def _keep_beating(self) -> None:
        """Heartbeats, in a thread of their own: they stop with the process, and while it is stopped."""
        while not self._left.wait(self._every_s):
            if self._address:
                with contextlib.suppress(LighthouseError):  # what is not heard now is said again
                    self._beating.beat(self._address)

    def leave(self) -> None:
        """Stop the heartbeats; the other groups go on without this one.

        Waits for a heartbeat under way: Python aborts a process that ends while a thread is in torchft's client.
        """
        atexit.unregister(self.leave)
        self._left.set()
        self._beats.join(LAST_BEAT_S)
