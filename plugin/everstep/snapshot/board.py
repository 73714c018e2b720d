"""What a keeper has heard from the other keepers of its parity groups, and its connections to them.

Keepers tell each other what happens: a part is verified, a code is chosen, a piece of it is published. Nobody polls. A
keeper that does not answer is a *suspect*: it is told things as before, in a thread of its own, but not waited for.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep import wire
from everstep.snapshot import peers
from everstep.snapshot.header import Header, Identity
from everstep.snapshot.stripes import Code

TELLERS = 16
"""Threads that tell other keepers things."""
REMEMBERED = 4
"""Identities of a rank that are remembered."""
IDLE_CHANNELS = 2
"""Connections kept open to one keeper; more are made while several ranks code at once, and closed afterwards."""
SUSPECT_S = 2.0
LOOK_S = 1.0
"""Between two looks into the run directory for a group of which no keeper is known."""


class Channels:
    """Connections to other keepers, kept open. Addresses are cached, and pushed by keepers that start."""

    def __init__(self, run_dir: Path, token: bytes, timeout: timedelta) -> None:
        self._run_dir, self._token, self._timeout = run_dir, token, timeout
        self._lock = threading.Lock()
        self._places: dict[int, tuple[float, str]] = {}
        self._looked: dict[int, float] = {}
        self._idle: dict[str, list[wire.Channel]] = {}
        self._closed = False

    def learn(self, group: int, address: str, started_at: float) -> None:
        """Where a group's keeper is, as it says itself."""
        idle: list[wire.Channel] = []
        with self._lock:
            known_since, known = self._places.get(group, (0.0, ""))
            if started_at >= known_since:
                self._places[group] = (started_at, address)
                idle = self._idle.pop(known, []) if known != address else []
        for channel in idle:  # to one that is gone
            channel.close()

    def address_of(self, group: int) -> str:
        """Raises wire.WireError when no keeper of the group is known."""
        with self._lock:
            known = self._places.get(group)
            looked = self._looked.get(group, -LOOK_S)
        if known is not None:
            return known[1]
        if time.monotonic() - looked >= LOOK_S:
            self._looked[group] = time.monotonic()
            for place in peers.find_places(self._run_dir, group)[:1]:
                self.learn(group, place.address, place.started_at)
                return place.address
        raise wire.WireError(f"no keeper of group {group} is known")

    def forget(self, group: int) -> None:
        """It could not be reached: look for it again in the run directory."""
        with self._lock:
            _, address = self._places.pop(group, (0.0, ""))
            self._looked.pop(group, None)
            idle = self._idle.pop(address, [])
        for channel in idle:
            channel.close()

    def take(self, group: int) -> wire.Channel:
        """A connection for this thread alone, until `give`. Raises wire.WireError."""
        for again in (True, False):
            address = self.address_of(group)
            with self._lock:
                idle = self._idle.get(address)
                channel = idle.pop() if idle else None
            if channel is not None:
                channel.set_timeout(self._timeout)
                return channel
            try:
                return peers.connect(address, self._token, self._timeout)
            except wire.WireError:
                self.forget(group)
                if not again:
                    raise
        raise AssertionError

    def give(self, channel: wire.Channel) -> None:
        """Keep the connection for the next. Only one on which no answer is due."""
        with self._lock:
            idle = self._idle.setdefault(channel.peer, [])
            if not self._closed and len(idle) < IDLE_CHANNELS:
                idle.append(channel)
                return
        channel.close()

    def ask(self, group: int, message: dict[str, Any]) -> dict[str, Any]:
        """One question. A connection that has been idle may be dead: then over a new one. Raises wire.WireError."""
        for again in (True, False):
            channel = self.take(group)
            try:
                answer = channel.ask(message)
            except wire.RefusedError:
                channel.close()
                raise
            except wire.WireError:
                channel.close()
                if not again:
                    self.forget(group)
                    raise
            else:
                self.give(channel)
                return answer
        raise AssertionError

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [channel for channels in self._idle.values() for channel in channels]
            self._idle.clear()
        for channel in idle:
            channel.close()


@dataclass
class Heard:
    """About one rank's snapshot of one identity."""

    parts: dict[int, Header] = field(default_factory=dict)
    """Verified parts, by group."""
    roomless: set[int] = field(default_factory=set)
    """Groups that cannot hold parity."""
    codes: dict[int, tuple[int, Code, str]] = field(default_factory=dict)
    """By the group that chose it: its number, the code, its name."""
    coded: dict[str, set[int]] = field(default_factory=dict)
    """By a code's name: the holders that have published their piece."""

    def code(self, suspects: set[int]) -> tuple[Code, str] | None:
        """The code to use: the one over most parts; of several that of the lowest group, its latest. None that waits
        for a suspect."""
        usable = {
            group: (code, name)
            for group, (_, code, name) in self.codes.items()
            if not suspects.intersection(code.givers) or self.coded.get(name, set()).issuperset(code.holders)
        }
        return usable[min(usable, key=lambda group: (-len(usable[group][0].givers), group))] if usable else None


class Board:
    """Everything heard, and telling others. Safe to use from several threads; `changed` is notified of news."""

    def __init__(self, group: int, channels: Channels, changed: threading.Condition, me: Callable[[], dict]) -> None:
        self._group, self._channels, self.changed, self._me = group, channels, changed, me
        self._heard: dict[int, dict[str, Heard]] = {}
        self._suspects: dict[int, float] = {}
        self._telling: dict[int, Future] = {}
        self._pool = ThreadPoolExecutor(TELLERS, thread_name_prefix="tell")

    def of(self, rank: int, identity: Identity) -> Heard:
        """What has been heard of that snapshot. Hold `changed` while reading or writing it."""
        known = self._heard.setdefault(rank, {})
        if identity.key not in known:
            while len(known) >= REMEMBERED:
                known.pop(next(iter(known)))
            known[identity.key] = Heard()
        return known[identity.key]

    def suspects(self) -> set[int]:
        """Groups whose keepers did not answer last time, or have owed an answer for a while."""
        now = time.monotonic()
        return {group for group, since in list(self._suspects.items()) if now - since > SUSPECT_S}

    def tell(self, groups: Any, message: dict[str, Any], then: Callable[[int, dict], None] | None = None) -> None:
        """Tell these groups' keepers something, all at once, and do not wait. `then`: gets each answer."""
        message = {**message, "from": self._me()}
        for group in groups:
            if group == self._group:
                continue
            before = self._telling.get(group)
            if before is not None and not before.done() and group in self.suspects():
                continue  # it has not answered the last: telling it more would only fill the threads
            self._telling[group] = self._pool.submit(self._tell, group, message, then)

    def _tell(self, group: int, message: dict[str, Any], then: Callable[[int, dict], None] | None) -> None:
        self._suspects.setdefault(group, time.monotonic())
        try:
            answer = self._channels.ask(group, message)
            if then is not None:
                then(group, answer)
        except wire.RefusedError:
            self._suspects.pop(group, None)
        except (wire.WireError, ValueError, TypeError, KeyError):
            self._suspects[group] = -SUSPECT_S
        else:
            self._suspects.pop(group, None)
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        self._channels.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def take_news(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What another keeper told: `part`, `code` or `coded`. Returns the answer. Raises ValueError for what is none.

        The answer to a part is the own part of the same snapshot, if it is verified, so that one telling informs both.
        """
        rank, identity = _rank_and_identity(message)
        sender = message.get("from")
        if isinstance(sender, dict) and type(sender.get("group")) is int and type(sender.get("address")) is str:
            self._channels.learn(sender["group"], sender["address"], float(sender.get("started_at", 0.0)))
        with self.changed:
            heard = self.of(rank, identity)
            operation = message.get("op")
            if operation == "part":
                self._take_part(heard, identity, message)
            elif operation == "code":
                self._take_code(heard, message)
            elif operation == "coded":
                group, name = message.get("group"), message.get("name")
                if type(group) is not int or type(name) is not str:
                    raise ValueError("a piece of no code")
                heard.coded.setdefault(name, set()).add(group)
            else:
                raise ValueError(f"'{operation}' is no news")
            self.changed.notify_all()
            own = heard.parts.get(self._group)
            mine = [name for name, groups in heard.coded.items() if self._group in groups]
            codes = [code_message(group, *chosen) for group, chosen in heard.codes.items()]
            roomless = self._group in heard.roomless
        return {"header": own.to_json() if own else None, "coded": mine, "roomless": roomless, "codes": codes}

    def _take_part(self, heard: Heard, identity: Identity, message: Mapping[str, Any]) -> None:
        header = Header.from_json(message.get("header"))
        if header.identity != identity or header.kind != "data":
            raise ValueError("a part of another snapshot")
        heard.parts[header.group] = header
        (heard.roomless.add if message.get("roomless") is True else heard.roomless.discard)(header.group)

    def _take_code(self, heard: Heard, message: Mapping[str, Any]) -> None:
        group, number, parity, name = (message.get(key) for key in ("group", "number", "parity", "name"))
        if not (type(group) is int and type(number) is int and type(parity) is int and type(name) is str):
            raise ValueError("a code without a number or name")
        code = Code(_groups(message.get("givers")), _groups(message.get("holders")), parity)
        if not (set(code.holders) <= set(code.givers) and 1 <= parity < len(code.holders)):
            raise ValueError("a code that is none")
        if number >= heard.codes.get(group, (0, code, ""))[0]:
            heard.codes[group] = (number, code, name)

    def heard_back(self, rank: int, identity: Identity, group: int, answer: Mapping[str, Any]) -> None:
        """The answer of `group` to one of our tellings about that snapshot."""
        with self.changed:
            heard = self.of(rank, identity)
            if answer.get("header") is not None:
                self._take_part(heard, identity, answer)
            for name in answer.get("coded", ()):
                heard.coded.setdefault(str(name), set()).add(group)
            for code in answer.get("codes", ()):
                self._take_code(heard, code)
            self.changed.notify_all()


def code_message(group: int, number: int, code: Code, name: str) -> dict[str, Any]:
    """A code as it is told: who chose it, its number among that group's, and what it is."""
    return {
        "group": group,
        "number": number,
        "givers": list(code.givers),
        "holders": list(code.holders),
        "parity": code.parity,
        "name": name,
    }


def _rank_and_identity(message: Mapping[str, Any]) -> tuple[int, Identity]:
    rank, identity = message.get("rank"), message.get("identity")
    if type(rank) is not int or not isinstance(identity, list) or len(identity) != 2:
        raise ValueError("a question about no snapshot")
    step, key = identity
    if type(step) is not int or type(key) is not str:
        raise ValueError("a question about no snapshot")
    return rank, Identity(step, key)


def _groups(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(group) is int for group in value):
        raise ValueError("groups that are none")
    return tuple(value)
