"""A group's voice at torchft's lighthouse.

Only rank 0 of a group has one; the other ranks learn from it. The lighthouse is asked directly: torchft's manager
would go on asking on behalf of a client that has given up, with that client's old step, and would collect votes that
nobody counts any more. What a group says of itself travels in the request's data and comes back in the quorum, so a
quorum that is not for the newest request is seen to be that.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torchft.coordination import LighthouseClient

from everstep.step.interfaces import QuorumUnavailable
from everstep.step.quorum import Member, Request, decode, encode

HEARTBEAT_S = 0.1
GROUP_DIGITS = 6
ASK_AGAIN_S = 0.1
DATA = "everstep"


class Membership:
    """Joins quorums for one group, and tells the lighthouse that it lives.

    Args:
        group: group id.
        life: differs after every start of the group's workers.
        find_lighthouse: gives `http://host:port`, and another one when the lighthouse has moved.
        connect_timeout: for connections to the lighthouse.
    """

    def __init__(
        self, *, group: int, life: str, find_lighthouse: Callable[[], str], connect_timeout: timedelta
    ) -> None:
        # Sorted as text by torchft, hence the zeros.
        self._replica_id = f"{group:0{GROUP_DIGITS}d}:{life}"
        self._find_lighthouse, self._connect_timeout = find_lighthouse, connect_timeout
        self._address = ""
        self._left = threading.Event()
        threading.Thread(target=self._keep_beating, name="lighthouse-heartbeat", daemon=True).start()

    def follow(self) -> bool:
        """Speak to the lighthouse where it is now. Whether it moved."""
        before, self._address = self._address, self._find_lighthouse()
        return before not in ("", self._address)

    def ask(self, request: Request, timeout: timedelta) -> tuple[int, list[Member]]:
        """See `everstep.step.interfaces.Membership`."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._ask_once(request, timedelta(seconds=max(left_s, 0.001)))
            except QuorumUnavailable:
                # A lighthouse that starts again is asked again until the time is up.
                if left_s < ASK_AGAIN_S or self._left.wait(ASK_AGAIN_S):
                    raise
                self.follow()

    def _ask_once(self, request: Request, timeout: timedelta) -> tuple[int, list[Member]]:
        try:
            client = LighthouseClient(self._address, min(timeout, self._connect_timeout))
            quorum = client.quorum(
                replica_id=self._replica_id,
                timeout=timeout,
                store_address=request.store,
                step=request.step,
                world_size=1,
                data={DATA: encode(request)},
            )
        except Exception as error:  # the Rust client raises several unrelated types
            raise QuorumUnavailable(str(error).partition("\n")[0][:300] or type(error).__name__) from error
        try:
            members = [decode(str((member.data or {}).get(DATA))) for member in quorum.participants]
        except ValueError as error:
            names = [member.replica_id for member in quorum.participants]
            raise QuorumUnavailable(f"not all of {names} are groups of this run: {error}") from error
        return int(quorum.quorum_id), members

    def _keep_beating(self) -> None:
        """Heartbeats, in a thread of their own: they stop with the process, and while it is stopped."""
        address, client = "", None
        while not self._left.wait(HEARTBEAT_S):
            with contextlib.suppress(Exception):  # what is not heard now is said again
                if client is None or address != self._address:
                    address, client = self._address, None
                    if address:
                        client = LighthouseClient(address, self._connect_timeout)
                if client is not None:
                    client.heartbeat(self._replica_id, timeout=self._connect_timeout)

    def leave(self) -> None:
        """Stop the heartbeats; the other groups go on without this one."""
        self._left.set()
