"""Finding the keepers of a run, and sending them requests."""

import concurrent.futures
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from everstep import wire
from everstep.run.files import read_typed, write_json
from everstep.run.typed import Count
from everstep.snapshot.buffer import root_of, table_bytes
from everstep.snapshot.header import Header, Kind, headers_from_json
from everstep.snapshot.segment import Segment

ASKERS = 256
"""Keepers that are asked at the same time."""
LOOK_S = 1.0
"""Seconds between two searches of the run directory for the keepers of a group."""
CONNECT_S = 1.0
"""Seconds to connect to one of several keepers of a group: it may be on a host that the group left and that is off."""


@dataclass(frozen=True)
class KeeperRecord:
    """Where a keeper listens. The keeper writes it to RUN_DIR/state/keepers for each group that it looks after."""

    group: Count
    host: str
    address: str
    pid: Annotated[int, Field(ge=2, le=1 << 31)]
    segment: str
    started_at: float


@dataclass(frozen=True)
class Held:
    """A buffer that a keeper says it holds."""

    address: str
    header: Header


def records_dir(run_dir: Path) -> Path:
    return run_dir / "state" / "keepers"


def record_file(run_dir: Path, group: int) -> Path:
    """Return the file with the record of this host's keeper of a group. Its name has the host, so that the old host's
    keeper can still be found after the group moves to another host."""
    return records_dir(run_dir) / f"group-{group}@{socket.gethostname()}.json"


def write_record(run_dir: Path, record: KeeperRecord) -> None:
    write_json(record_file(run_dir, record.group), asdict(record))


def read_records(run_dir: Path, group: int | None = None) -> list[KeeperRecord]:
    """Return the keepers that have been in this run, of one group or all, by group, the latest first. They need not be
    alive. This lists the folder once, and opens only the files of that group."""
    folder, prefix = records_dir(run_dir), "" if group is None else f"group-{group}@"
    try:
        names = [name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(".json")]
    except (FileNotFoundError, NotADirectoryError):  # no keeper yet
        return []
    found = filter(None, (read_typed(KeeperRecord, folder / name) for name in names))
    return sorted(found, key=lambda record: (record.group, -record.started_at))


def ask(address: str, token: bytes, message: dict[str, Any], timeout: timedelta) -> dict[str, Any]:
    """Send a keeper one request and return its answer. Raises wire.WireError."""
    with contextlib.closing(wire.connect(address, token, timeout)) as channel:
        return channel.ask(message)


def open_buffer(channel: wire.Channel, kind: Kind, group: int, rank: int, identity: str) -> dict[str, Any]:
    """Have a keeper serve payload and table, end to end, of its newest buffer of the snapshot `identity`, from now on.
    Returns the header that the keeper says this buffer has. Raises wire.RefusedError if it holds no such buffer."""
    question = {"op": "open", "kind": kind, "group": group, "rank": rank, "identity": identity}
    header = channel.ask(question).get("header")
    if not isinstance(header, dict):
        raise wire.RefusedError(f"{channel.peer} does not hold that step of group {group}")
    return header


class Neighbours:
    """The keepers of a run, as one keeper knows them."""

    def __init__(self, run_dir: Path, token: bytes) -> None:
        self._run_dir, self._token = run_dir, token
        self._addresses: dict[int, list[str]] = {}
        """Group -> addresses of its keepers, the one that answered last first."""
        self._looked: dict[int, float] = {}

    def open(self, group: int, rank: int, identity: str, deadline: float) -> tuple[wire.Channel, Header]:
        """Connect to a keeper that serves a group's part of a snapshot. Returns the connection and the part's header.
        Every receive on the connection fails after `deadline`, a time of time.monotonic().

        Raises wire.WireError if no known keeper holds the part now.
        """
        addresses, why = self._addresses.get(group, []), f"no keeper of group {group} is known"
        for address in addresses:
            channel = None
            try:
                left_s = max(0.001, deadline - time.monotonic())
                limit_s = left_s if len(addresses) == 1 else min(left_s, CONNECT_S)
                channel = wire.connect(address, self._token, timedelta(seconds=limit_s))
                channel.set_timeout(timedelta(seconds=left_s))
                channel.set_deadline(deadline)
                header = Header.from_json(open_buffer(channel, "data", group, rank, identity))
                if (header.kind, header.group, header.rank, header.identity) != ("data", group, rank, identity):
                    raise wire.RefusedError(f"{address} serves another buffer of group {group}")
            except (wire.WireError, ValueError) as error:
                why = str(error)
                if channel is not None:
                    channel.close()
                continue
            self._addresses[group] = [address, *(other for other in addresses if other != address)]
            return channel, header
        if time.monotonic() - self._looked.get(group, -LOOK_S) >= LOOK_S:
            self._looked[group] = time.monotonic()
            with contextlib.suppress(OSError):  # the run directory cannot be read: keep those known
                self._addresses[group] = [record.address for record in read_records(self._run_dir, group)]
        raise wire.WireError(why)


def download(channel: wire.Channel, header: Header, payload: wire.Pieces) -> None:
    """Fill `payload` with the payload of a buffer, and check that its table is the one that `header` vouches for.

    Raises wire.RefusedError if the keeper does not hold this buffer or sends another table; wire.WireError.
    """
    offered = open_buffer(channel, header.kind, header.group, header.rank, header.identity)
    if offered.get("root") != header.root:
        raise wire.RefusedError(f"{channel.peer} no longer holds the same buffer of step {header.step}")
    table = np.zeros(table_bytes(header.payload_bytes) // 8, dtype="<u8")
    wire.pull(channel, wire.Pieces([*payload.views(0, payload.size), table.view(np.uint8).data]))
    if root_of(table) != header.root:
        raise wire.RefusedError(f"{channel.peer} sent a checksum table of {header.kind} that does not match its header")


def reachable(
    records: Sequence[KeeperRecord], token: bytes, limit: timedelta
) -> tuple[dict[KeeperRecord, list[Held]], dict[KeeperRecord, str]]:
    """Return the buffers of every keeper that answers, and why the others did not answer; see `ask_all`."""
    held: dict[KeeperRecord, list[Held]] = {}
    answers, silent = ask_all(records, token, {"op": "inventory"}, limit)
    # Parsed only now, so that no keeper waits for this process: the answers of a thousand keepers take a second.
    for record, answer in answers.items():
        try:
            held[record] = [Held(record.address, header) for header in headers_from_json(answer.get("buffers"))]
        except ValueError as error:
            silent[record] = f"{record.address} keeps buffers of another version: {error}"
    return held, silent


def left_by(record: KeeperRecord, run: str) -> list[Held]:
    """Return a killed keeper's buffers on this host, which the run's next keeper adopts. Raises OSError."""
    if record.host != socket.gethostname():
        return []
    held = Segment(run, record.group, Path(record.segment)).inventory()
    return [Held(record.address, header) for header in held]


def ask_all(
    records: Sequence[KeeperRecord], token: bytes, message: dict[str, Any], limit: timedelta
) -> tuple[dict[KeeperRecord, dict[str, Any]], dict[KeeperRecord, str]]:
    """Return what each keeper answers to a request, and why the others did not answer.

    It asks `ASKERS` keepers at the same time. A keeper that has not answered after `limit` counts as silent.
    """
    answers: dict[KeeperRecord, dict[str, Any]] = {}
    silent: dict[KeeperRecord, str] = {}
    if not records:
        return answers, silent
    # A keeper that is off must not occupy a thread that another keeper needs.
    patience = max(timedelta(seconds=0.5), limit / 3)
    pool = ThreadPoolExecutor(min(ASKERS, len(records)), thread_name_prefix="ask-keepers")
    asked = {pool.submit(ask, record.address, token, message, patience): record for record in records}
    done, late = concurrent.futures.wait(asked, limit.total_seconds())
    for answer in done:
        try:
            answers[asked[answer]] = answer.result()
        except wire.WireError as error:
            silent[asked[answer]] = str(error)
    for answer in late:
        silent[asked[answer]] = f"{asked[answer].address} was silent for {limit.total_seconds():g} s"
    pool.shutdown(wait=False, cancel_futures=True)
    return answers, silent
