"""Workers' own states in hosts' memory, for semi-synchronous training. A state is a file in the segment. It outlives
the trainer that wrote it, and the keeper serves it to other hosts. A second host holds a copy, or else storage does."""

import contextlib
import mmap
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep import wire
from everstep.run.files import is_own_directory, open_regular, read_regular, write_whole
from everstep.run.memory import room_for
from everstep.run.token import read_token
from everstep.snapshot import peers
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.segment import Segment

NAME = re.compile(r"(worker-\d{1,9}\.rank-\d{1,9}\.)round-(\d{1,18})\.[0-9a-f]{1,16}")
OLDER, OLDER_COPIES = 1, 2
"""Rounds before the written one whose states are kept, on their host and as copies, because a round may have no copy.
States of later rounds are kept as well, because another history may have to go on from them."""
LOOK_S = 0.5
"""Seconds between two searches of other hosts for a state that they lacked, and the longest that one search takes."""
TIMEOUT = timedelta(seconds=10)
"""Longest silence of a keeper that sends or receives a state."""


def _parse(name: str) -> tuple[str, int]:
    """Return the worker and rank in a state's name, and its round. Raises wire.RefusedError for another name."""
    if not (found := NAME.fullmatch(name)):
        raise wire.RefusedError(f"'{name[:100]}' is not the name of a worker's state")
    return found[1], int(found[2])


def write(folder: Path, name: str, *data: bytes | memoryview, older: int) -> None:
    """Write a state; remove its worker's states and drafts of more than `older` rounds before it, and those of other
    workers, which another host may carry now, of more than OLDER_COPIES rounds before it. Raises OSError."""
    write_whole(folder / name, *data)
    whose, round_ = _parse(name)
    for path in folder.iterdir():
        of = NAME.match(path.name.removeprefix("."))
        if of is not None and int(of[2]) < round_ - (older if of[1] == whose else OLDER_COPIES):
            path.unlink(missing_ok=True)


def receive(folder: Path, message: dict[str, Any], channel: wire.Channel) -> str:
    """Fetch a state that the other side of the channel serves, and keep it. Returns why it is not kept; "" if it is.
    Raises wire.WireError."""
    name, size = str(message.get("name")), message.get("size")
    _parse(name)
    if type(size) is not int or size < 0:
        raise wire.RefusedError(f"'{size}' is not the size of a worker's state")
    with room_for(2 * size) as has_room:
        if not has_room:
            return f"{socket.gethostname()} has no room for {size} bytes"
        state = memoryview(bytearray(size))
        wire.pull(channel, wire.Pieces([state]))
        try:
            write(folder, name, state, older=OLDER_COPIES)
        except OSError as error:
            return f"{socket.gethostname()}: {error}"
    return ""


@contextlib.contextmanager
def opened(folder: Path, name: str) -> Iterator[wire.Bytes | None]:
    """Open the state of this name in a segment for serving; yields None if there is none."""
    _parse(name)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(folder / name, links=False))
            held = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError):  # an empty file cannot be mapped
            yield None
        else:
            yield wire.Pieces([held])


class WorkerStates:
    """Implements `everstep.semi.worker_store.Memory`: files in segments, and copies.

    Args:
        run_dir: the run directory.
        segment: the segment of a group on this host.
    """

    def __init__(self, run_dir: Path, segment: Segment) -> None:
        self.folder = segment.path
        with contextlib.suppress(SnapshotError):  # then nothing is kept there; `KeeperWatch` reports why
            segment.create()
        self._run_dir, self._group, self._token = run_dir, segment.group, read_token(run_dir)
        self._storage = run_dir / "state" / "workers"
        self._partner = ""
        """Address of the keeper that took a copy last."""
        self._holder: dict[str, str] = {}
        """Name of a state -> address of the keeper that holds it."""
        self._looked = "", 0.0
        """Name of the state that the last search did not find, "" if it did; time.monotonic() of that search."""

    def write(self, name: str, *data: bytes) -> None:
        if not is_own_directory(self.folder):
            raise PermissionError(f"{self.folder} belongs to another user: remove it or set snapshot.segment_dir")
        write(self.folder, name, *data, older=OLDER)

    def copy(self, name: str, *data: bytes) -> bool:
        order = lambda it: (it.address != self._partner, it.group < self._group, it.group)  # noqa: E731
        held = wire.Pieces(list(map(memoryview, data)))
        for record in sorted(self._others(), key=order):
            with (
                contextlib.suppress(wire.WireError),  # then ask the next keeper, and at last use storage
                contextlib.closing(wire.connect(record.address, self._token, TIMEOUT)) as channel,
            ):
                channel.send_frame({"op": "keep", "name": name, "size": held.size})
                if wire.serve_ranges(channel, held) == {"why": ""}:
                    self._partner = record.address
                    return True
        write(self._storage, name, *data, older=OLDER_COPIES)
        return False

    def _others(self) -> list[peers.KeeperRecord]:
        """Return the latest keeper of each group, if it is not this host's."""
        latest = {record.group: record for record in reversed(peers.read_records(self._run_dir))}
        here = socket.gethostname(), str(self.folder)  # a segment has the same path on every host
        return [record for record in latest.values() if (record.host, record.segment) != here]

    def _is_held(self, name: str, size: int) -> bool:
        """Return whether another host's keeper holds a state. A search that found nothing counts for LOOK_S."""
        looked_for, looked_mono = self._looked
        if name not in self._holder and (name != looked_for or time.monotonic() - looked_mono > LOOK_S):
            others = list({record.address: record for record in self._others()}.values())
            answers, _ = peers.ask_all(others, self._token, {"op": "worker", "name": name}, timedelta(seconds=LOOK_S))
            found = [record.address for record, answer in answers.items() if answer.get("size") == size]
            self._holder = dict.fromkeys([name], found[0]) if found else {}
            self._looked = "" if found else name, time.monotonic()
        return name in self._holder

    def fetch(self, name: str, size: int) -> bytes | None:
        with contextlib.suppress(OSError):
            return read_regular(self._storage / name, size)
        if not self._is_held(name, size):
            return None
        try:
            with contextlib.closing(wire.connect(self._holder.pop(name), self._token, TIMEOUT)) as channel:
                if channel.ask({"op": "worker", "name": name}).get("size") != size:
                    return None
                found = bytearray(size)
                wire.pull(channel, wire.Pieces([memoryview(found)]))
        except wire.WireError:
            return None
        return bytes(found)
