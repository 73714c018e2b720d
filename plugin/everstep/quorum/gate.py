"""The gate in front of torchft's lighthouse: admits the groups of this run only, and decides when each may ask.

torchft's lighthouse admits every replica, and forms no quorum while a stranger's heartbeats tell it to wait for one
more. So the lighthouse listens on loopback, and the gate listens where the groups can reach it. The gate speaks
`everstep.wire`: it answers only processes that prove that they have the run's token. Each message gets one answer:

    {"replica": ID, "makes": WORD}                       {"wanted": whether it should ask for a quorum}
    {"replica": ID, "said": TEXT, "timeout_s": …}        {"quorum_id": …, "members": [TEXT, …]}

ID is the group's name, TEXT its request, and WORD the quorum in which it makes steps (`everstep.quorum.request`:
`name_of`, `encode`, `Quorum.makers_word`). If no quorum forms, the answer is {"failed": why} and the connection stays.
The gate keeps the TEXTs to itself: the lighthouse lists all members in each answer, so it would copy each TEXT once for
each pair of members. The gate keeps the heartbeats too. It tells the lighthouse which groups are alive only while a
group asks, and leaves out a group whose connections have closed, so a death costs no timeout.

Groups make step after step in one quorum. The answer to a heartbeat tells a group to ask for a new quorum if another
group waits for one, or if groups make steps in different quorums because a broken network has separated them. Each
heartbeat says in which quorum a group makes steps, so that a gate that is started later learns that.

The lighthouse forms a quorum as soon as all members of the last one ask; otherwise, when more than half of the groups
ask and one of them has waited for the join timeout (torchft, src/lighthouse.rs, `quorum_compute`). A group that makes
no steps asks at any time. When the others ask again, it has waited for long: it would form a quorum with the first of
them, and leave out the others, who ask a millisecond later. So such groups wait at the gate until a group asks that
makes steps, or none of these is heard any more. A request that reaches the lighthouse just after a quorum waits there.
So the gate rejects a quorum without a group that makes steps, until one of these has waited for the join timeout.
"""

import math
import os
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from pydantic_core import to_json
from torchft.coordination import LighthouseClient, LighthouseServer

from everstep import wire
from everstep.quorum.membership import HEARTBEAT_S, PURPOSE, GateMessage
from everstep.quorum.request import DIGITS, Request, decode, differing_settings, encode, group_of, read_quorum
from everstep.run import typed

HEARING = 1.5
"""Heartbeat timeouts for which the gate passes no request on after it has begun to hear groups, at first or after half
a timeout of silence, in which they reconnect. So no group gets a quorum by itself. Ends sooner by `Gate._settles_s`."""
BEATS_S, BEAT_S = 0.2, 0.001
"""Seconds between two heartbeats that the gate sends the lighthouse for each living group while a quorum is asked for:
BEATS_S, or BEAT_S per group of the run if that is more, as one heartbeat takes 0.25 ms. After three times that without
one, the lighthouse takes a group for dead. A group without a connection counts for twice that after its last message.
If the gate sends no heartbeats for twice that, it rejects quorums that form soon afterwards."""
HEAD_START_S = 0.02
"""Seconds by which requests that waited for their turn are passed on before the request that gave them the turn."""
LOOPBACK, QUORUM_TICK_MS = "127.0.0.1", 50
KEPT = 16
"""Recent quorums that are remembered, as a member's thread may learn of its quorum late."""
CLIENTS = 8
"""Lasting connections to the lighthouse for quorum requests. It handles 200 requests at once on each."""
TELL_EVERY_S = 60.0
CONNECT_TIMEOUT = timedelta(seconds=10)
SILENCE = timedelta(minutes=10)
"""Silence after which a member's connection is closed. A member that is alive connects again."""


class _Waiting(NamedTuple):
    """A group's newest request, and the connection on which it waits for the answer."""

    request: Request
    channel: wire.Channel
    asking: threading.Lock
    """Held while a request of the group is at the lighthouse, which would answer a second one with a later quorum."""


@dataclass(frozen=True)
class QuorumRules:
    """Settings that decide when a quorum forms.

    Attributes:
        min_groups: fewest groups of a quorum.
        join_timeout_s: how long a quorum waits for a group that sends heartbeats but does not ask.
        heartbeat_timeout_s: silence after which a group is left out.
        groups: number of groups of the run; 0 if it is not known. A gate that hears so many has heard all.
    """

    min_groups: int
    join_timeout_s: float
    heartbeat_timeout_s: float
    groups: int


class Gate:
    """Runs torchft's lighthouse in this process, admits groups and passes their requests to it, until `close`.

    Args:
        token: the run's token.
        bind: (host, port) to listen on; port 0 for a free one.
        rules: when a quorum forms.
        tell: called every TELL_EVERY_S at most, with the number of refused strangers and where the last one came from.

    Raises:
        ConnectionError: the lighthouse does not answer, or the gate cannot listen on `bind`.
    """

    def __init__(
        self, token: bytes, bind: tuple[str, int], rules: QuorumRules, tell: Callable[[int, str], object]
    ) -> None:
        self._min_groups, self._join_s, self._tell = rules.min_groups, rules.join_timeout_s, tell
        self._timeout_s = rules.heartbeat_timeout_s
        self._groups, self._every_s = rules.groups or math.inf, max(BEATS_S, BEAT_S * rules.groups)
        self._refused, self._told = 0, -math.inf
        # The lighthouse and each client start a Tokio runtime. Set before the first one: its threads read the
        # environment, which must not change meanwhile.
        os.environ["TOKIO_WORKER_THREADS"] = "1"
        self._inner = LighthouseServer(
            bind=f"{LOOPBACK}:0",
            min_replicas=rules.min_groups,
            join_timeout_ms=round(rules.join_timeout_s * 1000),
            quorum_tick_ms=QUORUM_TICK_MS,
            heartbeat_timeout_ms=round(3 * self._every_s * 1000),
        )
        inner = f"http://{LOOPBACK}:{self._inner.address().rstrip('/').rpartition(':')[2]}"
        try:
            self._beats, *self._clients = [LighthouseClient(inner, CONNECT_TIMEOUT) for _ in range(CLIENTS + 1)]
        except Exception as error:  # the Rust client raises several unrelated types
            raise ConnectionError(f"torchft's lighthouse, in this process, does not answer: {error}") from error
        self._changed = threading.Condition()
        """Guards all that follows; notified when requests that wait for their turn may have got it."""
        self._heard: dict[str, float] = {}
        """Replica → when it last sent a heartbeat or request, in the order in which they were first heard."""
        self._makes: dict[str, str] = {}
        """Replica → the quorum in which it makes steps (`Quorum.makers_word`), empty for none, by its heartbeats."""
        self._waits: dict[str, _Waiting] = {}
        """Replica → its request, until that is answered."""
        self._unmet: dict[str, float] = {}
        """Replica → when it first asked. It is kept until a quorum has it, or forms while it does not wait for one."""
        self._split = False
        """Whether groups make steps in different quorums."""
        self._beating: dict[str, wire.Channel] = {}
        """Replica → the connection on which it sends heartbeats."""
        self._queued = 0
        """Number of requests that wait for their turn."""
        self._formed: deque[tuple[int, int]] = deque(maxlen=KEPT)
        """Creation times of the last quorums, only to tell these apart: the wall clock may be set back."""
        self._newest: dict[str, Any] | bytes = b""
        """The answer to all members of the newest quorum."""
        self._last_heard = self._hears_from = self._asks_from = self._believed_from = -math.inf
        self._beaten = time.monotonic()
        """When the lighthouse was last told which groups are alive; -inf if no group asks."""
        self._passed: set[str] = set()
        """Replicas whose request was passed to the lighthouse and that were in no quorum since. The lighthouse keeps
        such requests and may form a quorum of them."""
        self.lost = threading.Event()
        """Set when the lighthouse does not answer any more, or is closed."""
        host, port = bind
        self._server = wire.Server(
            host, token, self._talk, SILENCE, purpose=PURPOSE, port=port, on_stranger=self._refuse
        )
        self.address = self._server.address
        """`host:port` where groups reach the gate."""
        threading.Thread(target=self._keep_beating, name="lighthouse-heartbeats", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and shut the lighthouse down."""
        self.lost.set()
        self._server.close(wait=False)
        self._inner.shutdown()

    def _refuse(self, what: str) -> None:
        self._refused += 1
        if time.monotonic() - self._told > TELL_EVERY_S:
            self._told = time.monotonic()
            self._tell(self._refused, what)

    def _talk(self, channel: wire.Channel) -> None:
        beats = ""
        try:
            while True:
                message = channel.receive_frame()
                try:
                    asked = typed.parse(GateMessage, message)
                    request = decode(asked.said) if asked.said else None
                    if request is not None and asked.replica != request.name:
                        raise ValueError(f"it is of {request.name}, and {asked.replica} sent it")
                except ValueError as error:
                    raise wire.RefusedError(f"the request is not understood: {error}") from error
                if request is None:
                    beats = asked.replica
                    with self._changed:
                        self._beating[beats], self._makes[beats] = channel, asked.makes
                self._hear(asked.replica)
                if request is None:
                    channel.send_frame({"wanted": self._is_wanted(asked)})
                else:
                    channel.send_frame(self._quorum(asked, request, channel))
        finally:
            with self._changed:
                if self._beating.get(beats) is channel:
                    del self._beating[beats]

    def _hear(self, replica: str) -> None:
        now = time.monotonic()
        with self._changed:
            if now - self._last_heard > max(self._timeout_s / 2, min(self._timeout_s, 2 * HEARTBEAT_S)):
                self._hears_from, self._asks_from = now, now + HEARING * self._timeout_s
            self._heard[replica] = self._last_heard = now
            if now < self._asks_from:
                self._asks_from = min(self._asks_from, now + self._settles_s())

    def _settles_s(self) -> float:
        """Return the seconds until requests may be passed on, because all living groups are heard and reported to the
        lighthouse then. If all groups of the run were heard, its next heartbeats are enough. If only all makers of an
        asking group's last quorum were, wait longer, as that group may be wrong about deaths. Infinite if neither."""
        heard = [replica for replica in self._makes if self._heard.get(replica, -math.inf) >= self._hears_from]
        if len({*map(group_of, heard)}) >= self._groups:
            return 2 * self._every_s
        making = Counter(filter(None, map(self._makes.get, heard)))
        known = (0 < one.request.makers <= making[self._makes.get(name, "")] for name, one in self._waits.items())
        return 2 * max(self._every_s, HEARTBEAT_S) if any(known) else math.inf

    def _is_wanted(self, beat: GateMessage) -> bool:
        """Whether a group that sent a heartbeat should ask for a quorum."""
        with self._changed:
            return self._split or any(other != beat.replica and self._is_heard(other) for other in self._unmet)

    def _is_heard(self, replica: str, away_s: float = 0.0) -> bool:
        """Whether a group is alive, if one without a connection has `away_s` more to connect again."""
        patience_s = self._timeout_s if self._is_connected(replica) else 2 * self._every_s + away_s
        return time.monotonic() - self._heard.get(replica, -math.inf) < patience_s

    def _is_connected(self, replica: str) -> bool:
        return replica in self._beating or (replica in self._waits and not self._waits[replica].channel.hung_up())

    def _counting(self) -> dict[str, str]:
        """Return group id → the replica that counts: of several starts of a group that are heard, the one that appeared
        last. With two of them, no quorum would form until the older start finds out that it was replaced."""
        return {group_of(replica): replica for replica in self._heard if self._is_heard(replica)}

    def _stood_still(self) -> bool:
        """Whether the gate has sent the lighthouse no heartbeats for so long that it may take groups for dead."""
        return time.monotonic() - self._beaten > 2 * self._every_s

    def _keep_beating(self) -> None:
        """Send the lighthouse heartbeats of living groups that have a connection, while a quorum is asked for or about
        to be. While none is, the lighthouse takes all groups for dead, and later waits for none of them."""
        begun = time.monotonic()
        while not self.lost.is_set():
            with self._changed:
                left_s = max(0.0, begun + self._every_s - time.monotonic())
                self._changed.wait_for(lambda: self._waits and self._stood_still(), left_s)
                begun, counting = time.monotonic(), set(self._counting().values())
                alive = sorted(filter(self._is_connected, counting))
                self._split = len({self._makes.get(replica, "")[2 * DIGITS :] for replica in counting} - {""}) > 1
                if not self._waits and not self._passed:
                    self._beaten = -math.inf
                    continue
                if self._stood_still() and self._passed:
                    self._believed_from = begun + 2 * self._every_s
            for replica in alive:
                try:
                    self._beats.heartbeat(replica, timeout=CONNECT_TIMEOUT)
                except TimeoutError:
                    continue  # DEADLINE_EXCEEDED or CANCELLED: the lighthouse is busy
                except Exception:  # noqa: BLE001  any other gRPC status: it is dead, as it refuses no heartbeat
                    self.lost.set()
            with self._changed:
                self._beaten = begun
                self._changed.notify_all()

    def _quorum(self, asked: GateMessage, request: Request, channel: wire.Channel) -> dict[str, Any] | bytes:
        until = time.monotonic() + asked.timeout_s
        with self._changed:
            if self._counting().get(group_of(asked.replica), asked.replica) != asked.replica:
                return {"failed": "another start of this group has replaced this one"}
            asking = self._waits[asked.replica].asking if asked.replica in self._waits else threading.Lock()
            waiting = self._waits[asked.replica] = _Waiting(request, channel, asking)
            self._unmet.setdefault(asked.replica, time.monotonic())
        try:
            with asking:
                return self._answer(asked, waiting, until)
        finally:
            with self._changed:
                if self._waits.get(asked.replica) is waiting:
                    del self._waits[asked.replica]

    def _answer(self, asked: GateMessage, waiting: _Waiting, until: float) -> dict[str, Any] | bytes:
        if not self._wait_for_turn(waiting, until) or waiting.channel.hung_up():
            return {"failed": "none of the groups that make steps has asked for the next quorum"}
        with self._changed:
            if self._waits.get(asked.replica) is not waiting:  # its earlier request got it into the newest quorum
                return self._newest
        client = self._clients[zlib.crc32(asked.replica.encode()) % CLIENTS]
        try:
            left = timedelta(seconds=max(0.001, until - time.monotonic()))
            quorum = client.quorum(replica_id=asked.replica, timeout=left)
        except TimeoutError:
            return {"failed": self._why_none()}
        except Exception as error:  # noqa: BLE001  the Rust client raises several unrelated types
            return {"failed": str(error).partition("\n")[0][:300] or type(error).__name__}
        when = quorum.created.seconds, quorum.created.nanos
        with self._changed:
            if when not in self._formed:
                self._formed.append(when)
                members = [one.replica_id for one in quorum.participants]
                self._passed = self._passed.intersection(self._waits).difference(members)
                self._newest = self._form(int(quorum.quorum_id), members)
                self._changed.notify_all()
            return self._newest  # a group that is not in it asks again

    def _why_none(self) -> str:
        """Return why the lighthouse formed no quorum of the groups that asked."""
        with self._changed:
            living = self._counting()
            silent = [group for group, name in living.items() if name not in self._passed.union(self._waits)]
        if silent:
            return f"groups {', '.join(sorted(silent))} are alive but ask for none: they compute, or hang"
        return f"groups {', '.join(sorted(living))} are alive, and fault_tolerance.min_groups is {self._min_groups}"

    def _wait_for_turn(self, waiting: _Waiting, until: float) -> bool:
        """Wait until a request may be passed to the lighthouse, as one of the groups that quorums wait for has asked.
        Return whether that was before `until`, a time of `time.monotonic()`."""
        with self._changed:
            lets_others_pass = self._queued > 0 and self._may_pass()
            if not self._queued or (lets_others_pass and not self._stood_still()):
                self._changed.notify_all()  # not for every request, or each of hundreds would wake all before it
            self._queued += 1
            while (now := time.monotonic()) < until and self._waits.get(waiting.request.name) is waiting:
                if now >= self._asks_from and not self._stood_still() and self._may_pass():
                    self._passed.add(waiting.request.name)
                    break
                self._changed.wait(until - now)  # heartbeats wake it too: the makers may have died
            self._queued -= 1
        if lets_others_pass:
            time.sleep(HEAD_START_S)
        return time.monotonic() < until

    def _may_pass(self) -> bool:
        return not self._needed().isdisjoint(self._waits)

    def _needed(self) -> set[str]:
        """Return the heard groups that make the newest steps, or all that are heard if none does. No quorum is without
        one of them until one has waited for the join timeout. A group that makes steps in an earlier quorum waits for
        them too, as it missed the newer ones, and also while their heartbeats connect anew."""
        making = {name: makes for name, makes in self._makes.items() if makes and self._is_heard(name, 2 * HEARTBEAT_S)}
        newest = max(making.values(), default="")[: 2 * DIGITS]
        return {name for name in making if making[name].startswith(newest)} or set(self._counting().values())

    def _form(self, quorum_id: int, replicas: Collection[str]) -> dict[str, Any] | bytes:
        """Return the answer to all members of a new quorum."""
        now = time.monotonic()
        if now < self._believed_from or now - self._beaten > 3 * self._every_s:
            return {"failed": "the lighthouse's process stood still, and may have taken living groups for dead"}
        self._heard = {name: heard for name, heard in self._heard.items() if now - heard < SILENCE.total_seconds()}
        self._makes = {replica: makes for replica, makes in self._makes.items() if replica in self._heard}
        found = {replica: self._waits[replica] for replica in replicas if replica in self._waits}
        if left := len(replicas) - sum(not waiting.channel.hung_up() for waiting in found.values()):
            # The others would wait for it in vain. The lighthouse leaves it out once its heartbeats have stopped.
            return {"failed": f"{left} of {len(replicas)} members do not wait for the quorum any more"}
        needed = self._needed()
        asked_from = min((since for name, since in self._unmet.items() if name in needed), default=math.inf)
        missing = set(filter(self._is_connected, needed.intersection(self._counting().values()))) - found.keys()
        if missing and now < asked_from + self._join_s:
            return {"failed": f"groups {', '.join(sorted(map(group_of, missing)))} are alive and had not asked"}
        requests = [waiting.request for waiting in found.values()]
        try:
            read = read_quorum(quorum_id, requests)
        except ValueError as error:
            return {"failed": str(error)}
        if len(read.groups) < self._min_groups:
            pairs = ", ".join(f"{one} and {other}" for one, other in read.cut)
            why = differing_settings(requests) or f"no connections between {pairs}"
            return {"failed": f"fewer than {self._min_groups} groups reach each other: {why}"}
        self._heard |= dict.fromkeys(found, now)  # each waits on an open connection
        self._groups = max(self._groups, len(read.groups))  # the run may have been scaled up
        word, able = read.makers_word(), set(read.able)
        self._makes |= {name: word if one.request.group in able else "" for name, one in found.items()}
        self._waits = {name: one for name, one in self._waits.items() if one is not found.get(name)}
        self._unmet = {name: since for name, since in self._unmet.items() if name in self._waits}
        return to_json({"quorum_id": quorum_id, "members": [encode(request) for request in requests]})
