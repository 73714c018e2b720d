"""Finding the keepers of a run, and asking them."""

import concurrent.futures
import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from everstep import wire
from everstep.run import typed
from everstep.run.files import read_json, write_json
from everstep.run.typed import Count
from everstep.snapshot.header import Header, Identity, Kind

INVENTORY = {"op": "inventory"}
CONNECTIONS, TRIES = 2, 3
"""To download a buffer."""
ASKERS = 256
"""Keepers that are asked at a time."""


@dataclass(frozen=True)
class Place:
    """Where a keeper is. Written by it to RUN_DIR/state/keepers when it listens."""

    group: Count
    host: str
    address: str
    pid: Annotated[int, typed.Within(2, 1 << 31)]
    segment: str
    started_at: float


@dataclass(frozen=True)
class Held:
    """A buffer that a keeper says it holds."""

    address: str
    header: Header
    sound: bool | None
    """Whether its bytes match its checksums; None when the keeper has not got round to it."""

    def to_json(self) -> dict[str, Any]:
        return {"address": self.address, "header": self.header.to_json(), "sound": self.sound}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Held":
        """Raises ValueError for a header that is none."""
        return cls(body["address"], Header.from_json(body["header"]), body["sound"])


def places_dir(run_dir: Path) -> Path:
    return run_dir / "state" / "keepers"


def place_file(run_dir: Path, group: int) -> Path:
    """This host's keeper of a group. A group that moves to another host leaves the old host's keeper
    findable."""
    return places_dir(run_dir) / f"group-{group}@{socket.gethostname()}.json"


def write_place(run_dir: Path, place: Place) -> None:
    write_json(place_file(run_dir, place.group), asdict(place))


def read_place(path: Path) -> Place | None:
    """What `write_place` wrote; None if it is gone, or is something else."""
    try:
        return typed.parse(Place, read_json(path))
    except typed.UnfitError:
        return None


def read_places(run_dir: Path) -> list[Place]:
    """The keepers that have been in this run, by group, the latest first. They need not be alive."""
    found = filter(None, map(read_place, _place_files(run_dir, "")))
    return sorted(found, key=lambda place: (place.group, -place.started_at))


def find_places(run_dir: Path, group: int) -> list[Place]:
    """The keepers that have been in this run for one group, the latest first. One listing, and no other group's file is
    opened."""
    found = filter(None, map(read_place, _place_files(run_dir, f"group-{group}@")))
    return sorted(found, key=lambda place: -place.started_at)


def _place_files(run_dir: Path, prefix: str) -> list[Path]:
    folder = places_dir(run_dir)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # no keeper yet
        return [folder / name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(".json")]
    return []


def connect(address: str, token: bytes, timeout: timedelta) -> wire.Channel:
    """A channel to a keeper, encrypted if the keeper was told to (fault_tolerance.encrypt). Raises wire.WireError."""
    return wire.connect(address, token, timeout, encrypt=None)


def ask(address: str, token: bytes, message: dict[str, Any], timeout: timedelta) -> dict[str, Any]:
    """One question to a keeper. Raises wire.WireError."""
    channel = connect(address, token, timeout)
    try:
        return channel.ask(message)
    finally:
        channel.close()


def _listed(address: str, answer: dict[str, Any]) -> list[Held]:
    try:
        return [Held.from_json({**buffer, "address": address}) for buffer in answer["buffers"]]
    except (TypeError, KeyError, ValueError) as error:
        raise wire.WireError(f"{address} keeps buffers of another version: {error}") from error


def wanted(kind: Kind, group: int, rank: int, identity: Identity, code: str = "") -> dict[str, Any]:
    """Names a buffer in a question to a keeper."""
    return {"kind": kind, "group": group, "rank": rank, "identity": list(identity), "code": code}


def open_buffer(channel: wire.Channel, header: Header) -> None:
    """Make the channel serve exactly this buffer's payload and table, end to end.

    Raises wire.RefusedError when the keeper does not hold it, or another generation of it.
    """
    name = wanted(header.kind, header.group, header.rank, header.identity, header.code)
    answer = channel.ask({"op": "open", **name})
    if header_of(answer.get("header"), channel.peer) != header:
        raise wire.RefusedError(f"{channel.peer} has published step {header.step} anew")


def header_of(body: Any, peer: str) -> Header:
    """A header that a keeper sent. Raises wire.WireError if it is none."""
    try:
        return Header.from_json(body)
    except ValueError as error:
        raise wire.WireError(f"{peer} sent {error}") from error


class Hold:
    """Buffers that their trainers leave alone while this context lasts, so that large ones can be read at
    leisure. Snapshots that would need the place are skipped meanwhile.

    Entering raises wire.WireError if a keeper does not hold a buffer any more. A hold ends with the process that
    has it.
    """

    def __init__(self, buffers: Sequence[Held], token: bytes, timeout: timedelta) -> None:
        self._buffers, self._token, self._timeout = buffers, token, timeout
        self._channels: list[wire.Channel] = []
        self._over = threading.Event()

    def __enter__(self) -> "Hold":
        self._asker = threading.Thread(target=self._keep_asking, name="buffer-holder", daemon=True)
        try:
            for held in self._buffers:
                self._channels.append(connect(held.address, self._token, self._timeout))
                header = held.header
                question = wanted(header.kind, header.group, header.rank, header.identity)
                if not self._channels[-1].ask({"op": "hold", **question}).get("still"):
                    raise wire.WireError(f"{held.address} has gone on to another step")
        except wire.WireError:
            self._close()
            raise
        self._asker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._asker.join()
        self._close()

    def _keep_asking(self) -> None:
        # A keeper takes a peer that is silent for the transfer timeout for dead, and the buffer for free.
        while not self._over.wait(self._timeout.total_seconds() / 4):
            for channel in self._channels:
                with contextlib.suppress(wire.WireError):  # the download will notice
                    channel.ask({"op": "still"})

    def _close(self) -> None:
        for channel in self._channels:
            channel.close()


def download(address: str, token: bytes, timeout: timedelta, header: Header, sink: wire.Bytes) -> None:
    """Fill `sink` with a buffer's payload and table, over several connections, and take it up again where it broke off.
    Raises wire.WireError of the last try."""
    done: set[int] = set()
    count = max(1, min(CONNECTIONS, -(-sink.size // wire.RANGE_BYTES)))
    for left in reversed(range(TRIES)):
        channels: list[wire.Channel] = []
        try:
            for _ in range(count):
                channels.append(connect(address, token, timeout))
                open_buffer(channels[-1], header)
            wire.pull(channels, sink, done)
            return
        except wire.RefusedError:
            raise  # it is not there any more: no use in asking again
        except wire.WireError:
            if not left:
                raise
            time.sleep(0.1)  # lets a keeper that is being restarted listen again
        finally:
            for channel in channels:
                channel.close()


def reachable(
    places: Sequence[Place], token: bytes, timeout: timedelta, deadline_s: float | None = None
) -> tuple[dict[Place, list[Held]], dict[Place, str]]:
    """The buffers of every keeper that answers, and why the others did not.

    All are asked at once, `ASKERS` at a time. Who has not answered after `deadline_s`, or the timeout, is silent.
    """
    held: dict[Place, list[Held]] = {}
    silent: dict[Place, str] = {}
    if not places:
        return held, silent
    limit_s = timeout.total_seconds() if deadline_s is None else deadline_s
    # Those that are off must not keep the threads from those that are on.
    patience = min(timeout, timedelta(seconds=max(0.5, limit_s / 3)))
    pool = ThreadPoolExecutor(min(ASKERS, len(places)), thread_name_prefix="inventory")
    asked = {pool.submit(ask, place.address, token, INVENTORY, patience): place for place in places}
    done, late = concurrent.futures.wait(asked, limit_s)
    # What they said is read when nobody waits for this process any more: of a thousand keepers it takes a second.
    for answer in done:
        try:
            held[asked[answer]] = _listed(asked[answer].address, answer.result())
        except wire.WireError as error:
            silent[asked[answer]] = str(error)
    for answer in late:
        silent[asked[answer]] = f"{asked[answer].address} was silent for {limit_s:g} s"
    pool.shutdown(wait=False, cancel_futures=True)
    return held, silent
