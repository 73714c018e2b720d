"""The gate in front of torchft's lighthouse: only replicas of this run get through, and only with what replicas say.

torchft's lighthouse takes every replica in, forms no quorum while a stranger's heartbeats say that more are to come,
and ends any group for whoever asks (`POST /replica/ID/kill`, and a page that shows the ids). So it listens on loopback,
where after the gate's own connections nobody else can connect (`shut`), and the gate listens where groups reach it. It
speaks `everstep.wire`: who does not prove to hold the run's token is heard by nothing but the wire's door. Each request
is one message and is answered by one:

    {"op": "beat", "replica": ID}                                                      {}
    {"op": "quorum", "replica": ID, "store": …, "step": …, "timeout_s": …, "data": …}  {"quorum_id": …, "members": […]}

A quorum that there was not is answered by {"failed": why}; the connection stays. Who was not in the last quorum waits
for its turn (`everstep.quorum.turns`). What replicas say of themselves stays at the gate: the lighthouse gets a number
for it, as each answer of the lighthouse names all members, and what they say would be made into objects once for each
pair of members.
"""

import contextlib
import ctypes
import itertools
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from torchft.coordination import LighthouseClient

from everstep import wire
from everstep.quorum.identity import StrangerError, read_id
from everstep.quorum.own_sockets import listens, own_sockets
from everstep.quorum.turns import HEAD_START_S, LOOK_S, Turns
from everstep.run import typed

PURPOSE = "lighthouse"
CLIENTS = 8
"""Connections for quorum requests, which last; the lighthouse takes 200 at once on each."""
TELL_EVERY_S = 60.0
REQUESTS = 4
"""How many of a replica's last requests are remembered."""
CONNECT_TIMEOUT = timedelta(seconds=10)
SILENCE = timedelta(minutes=10)
"""After so long a member that says nothing is taken for gone; it connects again if it is not."""


class GateError(RuntimeError):
    """The gate cannot stand, or its lighthouse is gone; in one sentence."""


@dataclass(frozen=True)
class Asked:
    """A member's request for a quorum: what torchft's lighthouse is told. `data`: what the replica says of itself."""

    op: str
    replica: str
    store: str
    step: Annotated[int, typed.Within(-(1 << 62), 1 << 62)]
    timeout_s: Annotated[float, typed.Within(0.001, 86400.0)]
    data: dict[str, str]


class Gate:
    """Admits members and passes their requests to a lighthouse.

    Args:
        token: of the run.
        bind: (host, port) to listen on.
        inner: `http://host:port` of the lighthouse.
        every_s: one replica's heartbeats are passed on this often at most; the others are answered here.
        heartbeat_timeout_s: a replica that is silent for so long is gone.
        tell: called now and then with how many strangers were refused, and where the last one came from.
        encrypt: whether members must encrypt what they say.

    Raises:
        GateError: the lighthouse is not there, or `bind` cannot be listened on.
    """

    def __init__(
        self,
        token: bytes,
        bind: tuple[str, int],
        inner: str,
        every_s: float,
        heartbeat_timeout_s: float,
        tell: Callable[[int, str], None],
        encrypt: bool = False,
    ) -> None:
        self._token, self._every_s, self._tell = token, every_s, tell
        self._refused, self._told = 0, -TELL_EVERY_S
        try:
            self._heartbeat, *clients = [LighthouseClient(inner, CONNECT_TIMEOUT) for _ in range(CLIENTS + 1)]
        except Exception as error:  # the Rust client raises several unrelated types
            raise GateError(f"torchft's lighthouse does not answer behind its gate: {error}") from error
        self._clients = dict(enumerate(clients))
        self._waiting = Counter(dict.fromkeys(self._clients, 0))
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        """By replica: when it last beat or asked."""
        self._numbers = itertools.count()
        self._said: dict[str, dict[str, dict[str, str]]] = {}
        """By replica: what it said of itself in its last requests, by their numbers."""
        self._asking: dict[str, wire.Channel] = {}
        """By replica: where it waits for the answer to its newest request."""
        self._turns = Turns(
            lambda replica: time.monotonic() - self._heard.get(replica, -math.inf) < heartbeat_timeout_s
        )
        self._turn = threading.Condition()
        self._held = 0
        """Requests that wait for their turn."""
        self._newest: tuple[tuple[int, int], bytes] | None = None
        """When the newest quorum was formed, and the answer to all that are in it."""
        self.lost = threading.Event()
        """Set when the lighthouse does not answer any more."""
        self._bind, self._encrypt = bind, encrypt
        self._server: wire.Server | None = None

    def open(self) -> None:
        """Begin to listen. Raises GateError."""
        host, port = self._bind
        try:
            self._server = wire.Server(
                host,
                self._token,
                self._talk,
                SILENCE,
                purpose=PURPOSE,
                encrypt=self._encrypt,
                port=port,
                on_stranger=self._refuse,
            )
        except wire.WireError as error:
            raise GateError(f"cannot listen on {wire.format_address(host, port)}: {error}") from error

    def _refuse(self, what: str) -> None:
        self._refused += 1
        if time.monotonic() - self._told > TELL_EVERY_S:
            self._told = time.monotonic()
            self._tell(self._refused, what)

    def _talk(self, channel: wire.Channel) -> None:
        replica, passed_on = "", -self._every_s
        while True:
            message = channel.receive_frame()
            said = message.get("replica")
            if said != replica or not replica:
                try:
                    read_id(self._token, str(said))
                except StrangerError as error:
                    self._refuse(f"{channel.peer}: {error}")
                    raise wire.RefusedError("this lighthouse is of another run") from error
                replica = str(said)
            self._heard[replica] = time.monotonic()
            if message.get("op") == "beat":
                if time.monotonic() - passed_on >= self._every_s:
                    passed_on = time.monotonic()
                    self._beat(replica)
                channel.send_frame({})
                continue
            try:
                asked = typed.parse(Asked, message)
            except typed.UnfitError as error:
                raise wire.RefusedError(f"the request is not understood: {error}") from error
            self._asking[replica] = channel
            channel.send_frame(self._quorum(asked, channel))

    def _beat(self, replica: str) -> None:
        try:
            self._heartbeat.heartbeat(replica, timeout=CONNECT_TIMEOUT)
        except Exception as error:  # noqa: BLE001  the Rust client raises several unrelated types
            self._look_at(error)

    def _quorum(self, asked: Asked, channel: wire.Channel) -> dict[str, Any] | bytes:
        left_s = asked.timeout_s - self._wait_for_turn(asked)
        if left_s <= 0 or channel.hung_up():
            return {"failed": "none of the groups that make a step has asked for the next quorum"}
        with self._lock:
            number = min(self._waiting, key=self._waiting.__getitem__)
            self._waiting[number] += 1
            request = self._remember(asked)
        try:
            quorum = self._clients[number].quorum(
                replica_id=asked.replica,
                timeout=timedelta(seconds=left_s),
                address=request,
                store_address=asked.store,
                step=asked.step,
                world_size=1,
            )
        except Exception as error:  # noqa: BLE001  the Rust client raises several unrelated types
            self._look_at(error)
            return {"failed": str(error).partition("\n")[0][:300] or type(error).__name__}
        finally:
            with self._lock:
                self._waiting[number] -= 1
        return self._told_as(quorum)

    def _remember(self, asked: Asked) -> str:
        """What is said, until the replica has said other things. Returns the number that the lighthouse is told."""
        number, said = str(next(self._numbers)), self._said.setdefault(asked.replica, {})
        said[number] = asked.data
        if len(said) > REQUESTS:
            del said[next(iter(said))]
        return number

    def _forget(self) -> None:
        """What replicas said that have gone."""
        gone_at = time.monotonic() - SILENCE.total_seconds()
        for replica in [replica for replica in self._said if self._heard[replica] < gone_at]:
            del self._said[replica], self._asking[replica]

    def _wait_for_turn(self, asked: Asked) -> float:
        """Returns how long that took, in seconds: as long as the request's time at most."""
        begun = time.monotonic()
        with self._turn:
            self._turns.asked(asked.replica)
            gives_turn = self._held > 0 and self._turns.may_pass()
            if gives_turn:
                self._turn.notify_all()
            while not self._turns.may_pass() and time.monotonic() < begun + asked.timeout_s:
                self._held += 1
                self._turn.wait(LOOK_S)  # those it waits for may have died meanwhile
                self._held -= 1
        if gives_turn:
            time.sleep(HEAD_START_S)
        return time.monotonic() - begun

    def _told_as(self, quorum: Any) -> bytes | dict[str, Any]:
        """What members are told of a quorum: made once for all that are in it."""
        when = quorum.created.seconds, quorum.created.nanos
        with self._lock:
            if self._newest is None or self._newest[0] != when:
                try:
                    members = [
                        [member.replica_id, self._said[member.replica_id][member.address]]
                        for member in quorum.participants
                    ]
                except KeyError:
                    return {"failed": "the lighthouse names a request that did not come through its gate"}
                told = wire.encoded({"quorum_id": int(quorum.quorum_id), "members": members})
                if left := [m for m in quorum.participants if self._asking[m.replica_id].hung_up()]:
                    # It would be waited for in vain; the lighthouse leaves it out once it has not beaten for a while.
                    told = wire.encoded({"failed": f"{len(left)} of {len(members)} members ended while they waited"})
                self._forget()  # not before: members may have been asked for so long ago
                if self._newest is not None and self._newest[0] > when:
                    return told  # to one whose answer was on its way for long
                self._newest = when, told
                with self._turn:
                    self._turns.formed({member.replica_id: member.step for member in quorum.participants})
            return self._newest[1]

    def _look_at(self, error: Exception) -> None:
        if "Unavailable" in str(error):  # gRPC's status; the client has no other sign of a lighthouse that is gone
            self.lost.set()

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shut()


def shut(port: int) -> bool:
    """Let nobody else connect to a port of 127.0.0.1 that this process listens on and has connected to.

    The kernel drops what comes to the listening socket (SO_ATTACH_FILTER with a filter that takes nothing), and
    connections of others that came before are closed. Returns whether that worked, which it does not where the kernel
    knows no filters.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    own, shut_ones = set(), 0  # own: ports that this process has connected from
    try:
        for sock in own_sockets():
            with contextlib.suppress(OSError):
                if sock.getpeername()[1] == port:
                    own.add(sock.getsockname()[1])
            if sock.getsockname()[1] == port and listens(sock):
                sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
                shut_ones += 1
        for sock in own_sockets():
            with contextlib.suppress(OSError):
                if sock.getsockname()[1] == port and sock.getpeername()[1] not in own:
                    sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return shut_ones > 0


def loopback_port(address: str) -> int:
    """The port of `http://host:port`."""
    return int(address.rstrip("/").rpartition(":")[2])
