"""The gate in front of torchft's lighthouse: only groups of this run get through, and only with what groups say.

torchft's lighthouse takes every replica in, and forms no quorum while a stranger's heartbeats say that more are to
come. So it listens on loopback, and the gate listens where groups reach it. The gate speaks `everstep.wire`: nobody who
does not prove to hold the run's token is heard. Each request is one message and is answered by one:

    {"replica": ID, "makes": WORD}                       {"wanted": whether it should ask for a quorum}
    {"replica": ID, "said": TEXT, "timeout_s": …}        {"quorum_id": …, "members": [TEXT, …]}

ID is the group's name, TEXT what it says of itself and WORD in which quorum it makes steps (`everstep.quorum.request`:
`name_of`, `encode`, `Quorum.makers`). A request without a quorum is answered by {"failed": why}; the connection stays.
What groups say stays at the gate: torchft's lighthouse names all members in each of its answers, and would copy it once
for each pair of members. So do heartbeats: the gate tells the lighthouse who lives, once somebody asks, and leaves out
a group whose connections have closed: a death costs no timeout.

Groups make step after step in one quorum. The answer to a heartbeat tells them to ask for the next one: another group
waits for it, or makes steps in another quorum, because a broken network has let them go apart. Each heartbeat says in
which quorum a group makes steps, so that a gate that was started later knows as much.

The lighthouse makes a new quorum as soon as all members of the last one ask, and else when more than half of the groups
ask and one of them has waited for the join timeout (torchft, src/lighthouse.rs, `quorum_compute`). A group that comes
back while the others make a step has waited for longer than that when they ask again. With it and the first of them
there is a majority, and a quorum without the others, who ask a millisecond later: of three groups one is then left out
of each step, another one each time, and heals. The same would happen with a member of the last quorum that makes no
step, because it has no state or cannot be reached: it asks again at once. So groups wait at the gate, where their time
does not count, until one asks that makes steps, or none of those is heard any more.
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
from typing import Any

from torchft.coordination import LighthouseClient, LighthouseServer

from everstep import wire
from everstep.quorum.membership import HEARTBEAT_S, PURPOSE, Asked
from everstep.quorum.request import Request, decode, differing_settings, encode, group_of, read_quorum
from everstep.run import typed

HEARING = 1.5
"""For how many heartbeat timeouts at most nobody may ask after the gate has begun to hear groups: by then it has heard
all that live (sooner: `Gate._settles_s`), so that the first of them does not get a quorum of its own."""
BEATS_S, BEAT_S = 0.2, 0.001
"""Between two heartbeats that torchft's lighthouse gets of each group that lives while it is asked for a quorum, and at
least for each group of the run: one takes 0.25 ms. After three times that without one the lighthouse takes a group for
dead. After twice that, a group without a heartbeat connection no longer counts, and new quorums are rejected."""
HEAD_START_S = 0.02
"""For the requests that waited for their turn, before that which gave it to them."""
LOOPBACK, QUORUM_TICK_MS = "127.0.0.1", 50
KEPT = 16
"""Quorums that some member's thread may learn of late."""
CLIENTS = 8
"""Connections for quorum requests, which last; the lighthouse takes 200 at once on each."""
TELL_EVERY_S = 60.0
CONNECT_TIMEOUT = timedelta(seconds=10)
SILENCE = timedelta(minutes=10)
"""After so long a member that says nothing is taken for gone; it connects again if it is not."""


@dataclass(frozen=True)
class _Waiting:
    """A member's newest request, and where it waits for the answer."""

    request: Request
    channel: wire.Channel


@dataclass(frozen=True)
class Rules:
    """When there is a quorum.

    Attributes:
        min_groups: none has fewer.
        join_timeout_s: how long one waits for a group that heartbeats but has not asked to join.
        heartbeat_timeout_s: a group silent for this long is left out.
        groups: of the run. A gate that hears so many has heard all; 0: nobody knows.
    """

    min_groups: int = 1
    join_timeout_s: float = 2.0
    heartbeat_timeout_s: float = 2.0
    groups: int = 0


class Gate:
    """torchft's lighthouse, in this process; admits members and passes their requests to it, until `close`.

    Args:
        token: of the run.
        bind: (host, port) to listen on; port 0 for a free one.
        rules: when there is a quorum.
        tell: called now and then with how many strangers were refused, and where the last one came from.

    Raises:
        ConnectionError: the lighthouse is not there, or `bind` cannot be listened on.
    """

    def __init__(self, token: bytes, bind: tuple[str, int], rules: Rules, tell: Callable[[int, str], object]) -> None:
        self._min_groups, self._timeout_s, self._tell = rules.min_groups, rules.heartbeat_timeout_s, tell
        self._groups, self._every_s = rules.groups or math.inf, max(BEATS_S, BEAT_S * rules.groups)
        self._refused, self._told = 0, -math.inf
        # The lighthouse and each of its clients have a runtime of their own. Set before there is any: their threads
        # read the environment, which must not move under them.
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
            raise ConnectionError(f"torchft's lighthouse does not answer behind its gate: {error}") from error
        self._changed = threading.Condition()
        """Guards all that follows; notified when those that wait for their turn may have it."""
        self._heard: dict[str, float] = {}
        """By replica, in the order in which they were first heard: when it last beat or asked."""
        self._makes: dict[str, str] = {}
        """By replica that has beaten, in which quorum it makes steps; empty for none."""
        self._waits: dict[str, _Waiting] = {}
        """By replica, its request while there is no quorum for it."""
        self._split = False
        """Whether groups make steps in different quorums."""
        self._makers = ""
        """In which quorum those make steps that the others wait for; empty for any, while none was formed here. Whoever
        made steps in an earlier one is one that waits: it was not there for the newer ones."""
        self._beating: dict[str, wire.Channel] = {}
        """By replica, the connection on which it beats."""
        self._queued = 0
        """Requests that wait for their turn."""
        self._formed: deque[tuple[int, int]] = deque(maxlen=KEPT)
        """When the last quorums were formed, by a wall clock that may be set back: it tells them apart, no more."""
        self._newest: dict[str, Any] | bytes = b""
        """The answer to all that are in the newest quorum."""
        self._last_heard = self._hears_from = self._asks_from = self._believed_from = -math.inf
        self._beaten = time.monotonic()
        """When the lighthouse was last told who lives; long ago if nobody asks."""
        self._passed: set[str] = set()
        """Replicas that it was asked for and that were in no quorum since: it forms one of them once it may."""
        self.lost = threading.Event()
        """Set when the lighthouse does not answer any more."""
        self._closed = threading.Event()
        host, port = bind
        self._server = wire.Server(
            host, token, self._talk, SILENCE, purpose=PURPOSE, port=port, on_stranger=self._refuse
        )
        self.address = self._server.address
        """`host:port` where groups reach it."""
        threading.Thread(target=self._keep_beating, name="lighthouse-heartbeats", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end the lighthouse."""
        self._closed.set()
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
                    asked = typed.parse(Asked, message)
                    request = decode(asked.said) if asked.said else None
                    if request is not None and asked.replica != request.name:
                        raise ValueError("it is of another replica")
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
                    channel.send_frame(self._quorum(asked, _Waiting(request, channel)))
        finally:
            with self._changed:
                if self._beating.get(beats) is channel:
                    del self._beating[beats]

    def _hear(self, replica: str) -> None:
        now = time.monotonic()
        with self._changed:
            if now - self._last_heard > self._timeout_s:
                self._hears_from, self._asks_from = now, now + HEARING * self._timeout_s
            self._heard[replica] = self._last_heard = now
            if now < self._asks_from:
                self._asks_from = min(self._asks_from, now + self._settles_s())

    def _settles_s(self) -> float:
        """In how long all that live are heard and the lighthouse is told of them: at its next heartbeats if all groups
        of the run were heard; later if only all were that make steps with one that asks and that it does not know to
        be dead, as it may err."""
        heard = [replica for replica in self._makes if self._heard.get(replica, -math.inf) >= self._hears_from]
        if len({*map(group_of, heard)}) >= self._groups:
            return 2 * self._every_s
        making = Counter(filter(None, map(self._makes.get, heard)))
        known = (0 < one.request.makers <= making[self._makes.get(name, "")] for name, one in self._waits.items())
        return max(2 * self._every_s, 2 * HEARTBEAT_S) if any(known) else math.inf

    def _is_wanted(self, beat: Asked) -> bool:
        """Whether a group that beats should ask for a quorum."""
        with self._changed:
            return self._split or any(other != beat.replica and self._is_heard(other) for other in self._waits)

    def _is_heard(self, replica: str) -> bool:
        patience_s = self._timeout_s if replica in self._beating else min(2 * self._every_s, self._timeout_s)
        return time.monotonic() - self._heard.get(replica, -math.inf) < patience_s

    def _counting(self) -> dict[str, str]:
        """By group the replica that counts: of several starts that are heard, the one that was heard of last. A group
        that is there twice would keep all from a quorum until the older start finds that it is not wanted."""
        with self._changed:
            return {group_of(replica): replica for replica in self._heard if self._is_heard(replica)}

    def _stood_still(self) -> bool:
        """Whether the lighthouse was not told who lives for so long that it may take groups for dead."""
        return time.monotonic() - self._beaten > 2 * self._every_s

    def _keep_beating(self) -> None:
        """Tell the lighthouse who lives, while it is asked or about to be: whoever beats, and not who has closed its
        connections. While nobody asks, it takes all for dead, and waits for none of them later."""
        begun = time.monotonic()
        while not self._closed.is_set():
            with self._changed:
                left_s = max(0.0, begun + self._every_s - time.monotonic())
                self._changed.wait_for(lambda: self._waits and self._stood_still(), left_s)
            begun, counting = time.monotonic(), set(self._counting().values())
            self._split = len({self._makes.get(replica, "") for replica in counting} - {""}) > 1
            with self._changed:
                if not self._waits and not self._passed:
                    self._beaten = -math.inf
                    continue
                if (stood_still := self._stood_still()) and self._passed:
                    self._believed_from = begun + 2 * self._every_s
            # Those that it was asked for are never alone: they expire first, and come last if they have expired.
            for replica in sorted(counting, key=lambda replica: ((replica in self._passed) == stood_still, replica)):
                if replica in self._beating:
                    try:
                        self._beats.heartbeat(replica, timeout=CONNECT_TIMEOUT)
                    except TimeoutError:
                        continue  # DEADLINE_EXCEEDED or CANCELLED: it is busy
                    except Exception:  # noqa: BLE001  any other status of gRPC: the lighthouse refuses no heartbeat
                        self.lost.set()
            with self._changed:
                self._beaten = begun
                self._changed.notify_all()

    def _quorum(self, asked: Asked, waiting: _Waiting) -> dict[str, Any] | bytes:
        if self._counting().get(group_of(asked.replica), asked.replica) != asked.replica:
            return {"failed": "another start of this group counts now"}
        with self._changed:
            self._waits[asked.replica] = waiting
        try:
            return self._answer(asked, waiting)
        finally:
            with self._changed:
                if self._waits.get(asked.replica) is waiting:
                    del self._waits[asked.replica]

    def _answer(self, asked: Asked, waiting: _Waiting) -> dict[str, Any] | bytes:
        until = time.monotonic() + asked.timeout_s
        if not self._wait_for_turn(waiting, until) or waiting.channel.hung_up():
            return {"failed": "none of the groups that make a step has asked for the next quorum"}
        with self._changed:
            if self._waits.get(asked.replica) is not waiting:  # an earlier one held its place in the newest quorum
                return self._newest
        client = self._clients[zlib.crc32(asked.replica.encode()) % CLIENTS]
        try:
            left = timedelta(seconds=max(0.001, until - time.monotonic()))
            quorum = client.quorum(replica_id=asked.replica, timeout=left)
        except TimeoutError:
            living = ", ".join(sorted(self._counting()))
            return {"failed": f"groups {living} are heard, and fault_tolerance.min_groups is {self._min_groups}"}
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
            return self._newest  # whoever is not in it asks again

    def _wait_for_turn(self, waiting: _Waiting, until: float) -> bool:
        """Whether the turn came before `until` (`time.monotonic()`)."""
        with self._changed:
            lets_others_pass = self._queued > 0 and self._may_pass()
            if not self._queued or (lets_others_pass and not self._stood_still()):
                self._changed.notify_all()  # else each of hundreds would wake all before it
            self._queued += 1
            while (now := time.monotonic()) < until and self._waits.get(waiting.request.name) is waiting:
                if now >= self._asks_from and not self._stood_still() and self._may_pass():
                    self._passed.add(waiting.request.name)
                    break
                self._changed.wait(until - now)  # or until the next heartbeats: those it waits for may have died
            self._queued -= 1
        if lets_others_pass:
            time.sleep(HEAD_START_S)
        return time.monotonic() < until

    def _may_pass(self) -> bool:
        """Whether those that make no step may ask: one of those that do has, or none of them is heard."""
        making = [name for name, makes in self._makes.items() if makes and makes == (self._makers or makes)]
        return not any(map(self._is_heard, making)) or any(name in self._waits for name in making)

    def _form(self, quorum_id: int, replicas: Collection[str]) -> dict[str, Any] | bytes:
        """The answer to all members of a new quorum."""
        now = time.monotonic()
        if now < self._believed_from or now - self._beaten > 3 * self._every_s:
            return {"failed": "this process stood still, and its lighthouse took groups for dead meanwhile"}
        gone_at = now - SILENCE.total_seconds()
        self._heard = {replica: heard for replica, heard in self._heard.items() if heard > gone_at}
        self._makes = {replica: makes for replica, makes in self._makes.items() if replica in self._heard}
        found = {replica: self._waits[replica] for replica in replicas if replica in self._waits}
        if len(found) < len(replicas):
            return {"failed": "the lighthouse names a replica that does not wait at its gate"}
        if left := sum(waiting.channel.hung_up() for waiting in found.values()):
            # It would be waited for in vain; the lighthouse leaves it out once it has not beaten for a while.
            return {"failed": f"{left} of {len(found)} members ended while they waited"}
        requests = [waiting.request for waiting in found.values()]
        try:
            read = read_quorum(quorum_id, requests)
        except ValueError as error:
            return {"failed": str(error)}
        if len(read.groups) < self._min_groups:
            pairs = ", ".join(f"{one} and {other}" for one, other in read.cut)
            why = differing_settings(requests) or f"no connections between {pairs}"
            return {"failed": f"fewer than {self._min_groups} groups reach each other: {why}"}
        self._heard |= dict.fromkeys(found, now)  # each waits on a connection that stands
        self._groups = max(self._groups, len(read.groups))  # a run may have been scaled
        self._makers, able = read.makers(), set(read.able)
        self._makes |= {name: self._makers if one.request.group in able else "" for name, one in found.items()}
        self._waits = {name: one for name, one in self._waits.items() if one is not found.get(name)}
        return wire.encoded({"quorum_id": quorum_id, "members": [encode(request) for request in requests]})
