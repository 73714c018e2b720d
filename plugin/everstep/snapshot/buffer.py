"""A buffer: one file on tmpfs that holds one step's payload, or nothing a reader accepts.

    [0, 16 KiB)  header: magic, length and XXH3 of a JSON body, the body
    [16 KiB, …)  payload
    after it     table: the XXH3-64 of every MiB of the payload

Publication order: the old header is wiped, then payload, table, and last the header with the table's own XXH3
(`root`). So a header that is whole vouches for a table, and the table for every byte; a reader that finds the
same header before and after it has read has read one step. Checksums decide, not the order in which memory
becomes visible to other processes, so this also holds where stores are reordered.

Trainers write through a mapping. Readers use `pread` only: a file that is cut short under them is a short
read, where a mapping would be SIGBUS.

Host memory is not ours alone: what is left of it is looked at before more is taken.
"""

import contextlib
import errno
import functools
import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from everstep.run.memory import free_memory
from everstep.run.regular import open_regular
from everstep.snapshot.header import Header

BUFFERS = 2
"""Of a rank, and as many of parity: the newest coded snapshot, and the one that is being written."""
STEP_BYTES, POPULATE_BYTES = 64 << 20, 2 << 20
ENLARGE = "snapshot.segment_dir; Docker: --shm-size"


class SnapshotError(RuntimeError):
    """A buffer that cannot be made, written or believed, or a keeper that cannot be started; the message says which and
    why."""


def allocate(fd: int, path: Path, size: int, reserve_bytes: int) -> None:
    """Give a file on tmpfs memory up to this size, step by step, and look before each whether there is room for what
    is left. So processes that do so at the same moment take a step each too much at most, which the reserve has.

    Raises SnapshotError, with bytes needed and found, or OSError; the file is then as large as it was.
    """
    had, at = os.fstat(fd).st_size, 0
    try:
        for at in range(had, size, STEP_BYTES):
            check_room(path.parent, size - at, reserve_bytes)
            # Without it a full tmpfs would be SIGBUS in the middle of a copy.
            os.posix_fallocate(fd, at, min(STEP_BYTES, size - at))
    except BaseException as error:
        os.ftruncate(fd, had)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # another process took it meanwhile
            raise SnapshotError(
                f"snapshots need {size - at} bytes more, and {path.parent} is full ({ENLARGE})"
            ) from error
        raise


def check_room(directory: Path, bytes_needed: int, reserve_bytes: int) -> None:
    """Raises SnapshotError, with bytes needed and found, when `bytes_needed` more in `directory` would not fit: in the
    tmpfs, in the host's free memory or in this control group's limit, less what is to stay free."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise SnapshotError(f"{directory} cannot be used: {error.strerror} (snapshot.segment_dir)") from error
    free, where = free_memory()
    in_tmpfs = status.f_bavail * status.f_frsize, f"free in {directory} ({ENLARGE})"
    least, where = min((free - reserve_bytes, where), in_tmpfs)
    if bytes_needed > least:
        raise SnapshotError(f"snapshots need {bytes_needed} bytes more, and there are {max(least, 0)} {where}")


MAGIC = b"evsbuf01"
HEADER_BYTES = 16 << 10
CHUNK_BYTES = 1 << 20
"""What one checksum is over, and what coding holds of each shard at a time."""
SPARE_BYTES = 16 << 10
"""Of a file: what a snapshot carries beside tensors is a few bytes longer at one step than at another, and to make room
anew costs as much as the copy."""
_PREFIX = struct.Struct("<8sIQ")
_MADV_POPULATE_WRITE = 23  # Linux >= 5.14, elsewhere an error; absent from Python's mmap


def chunks(payload_bytes: int) -> list[tuple[int, int]]:
    """Where the chunks of a payload begin and end: every MiB."""
    return [(at, min(at + CHUNK_BYTES, payload_bytes)) for at in range(0, payload_bytes, CHUNK_BYTES)]


def table_bytes(payload_bytes: int) -> int:
    """Size of the chunk table of a payload."""
    return -(-payload_bytes // CHUNK_BYTES) * 8


def file_bytes(payload_bytes: int) -> int:
    """Size that a file with this payload has at least."""
    return HEADER_BYTES + payload_bytes + table_bytes(payload_bytes)


def chunk_digests(payload: memoryview) -> np.ndarray:
    """The chunk table of a payload in memory: uint64, one per chunk."""
    return as_table([xxhash.xxh3_64_intdigest(payload[a:b]) for a, b in chunks(len(payload))])


def as_table(digests: Sequence[int]) -> np.ndarray:
    return np.array(digests, dtype="<u8")


def root_of(table: np.ndarray) -> str:
    """The digest that vouches for a chunk table."""
    return xxhash.xxh3_64_hexdigest(table.astype("<u8", copy=False).tobytes())


def _pack_header(header: Header) -> bytes:
    body = json.dumps(header.to_json(), separators=(",", ":")).encode()
    if len(body) + _PREFIX.size > HEADER_BYTES:
        raise SnapshotError(
            f"the header of step {header.step} has {len(body)} bytes and does not fit in {HEADER_BYTES}"
        )
    return _PREFIX.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _unpack_header(area: bytes) -> Header | None:
    if len(area) < _PREFIX.size:
        return None
    magic, length, digest = _PREFIX.unpack_from(area)
    body = area[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or len(body) != length or xxhash.xxh3_64_intdigest(body) != digest:
        return None
    return _parsed(body)


@functools.lru_cache(maxsize=1024)
def _parsed(body: bytes) -> Header | None:
    """Headers are read over and over, by those who wait for the next."""
    try:
        return Header.from_json(json.loads(body))
    except (ValueError, RecursionError):
        return None  # of another schema, or a lie: nothing that this version may use


class BufferReader:
    """Reads a buffer that another process may be overwriting or deleting."""

    def __init__(self, path: Path, payload_bytes: int = 0) -> None:
        """`payload_bytes`: of what is to be served. Raises OSError: it is not there, not ours, or no file, such as a
        pipe, which would be waited for."""
        self.path, self.size = path, payload_bytes + table_bytes(payload_bytes)
        with open_regular(path) as file:
            self._fd = os.dup(file.fileno())
        self._buffer = memoryview(b"")

    def close(self) -> None:
        os.close(self._fd)

    def header(self) -> Header | None:
        """The header, or None when nothing is published: empty, being written, damaged or cut short."""
        header = _unpack_header(os.pread(self._fd, HEADER_BYTES, 0))
        short = header is None or os.fstat(self._fd).st_size < file_bytes(header.payload_bytes)
        return None if short else header

    def read_into(self, view: memoryview, offset: int) -> None:
        """Payload and table, end to end, from `offset` on. Raises SnapshotError when the file has become too
        short."""
        got = 0
        while got < len(view):
            n = os.preadv(self._fd, [view[got:]], HEADER_BYTES + offset + got)
            if n == 0:
                raise SnapshotError(f"{self.path} was cut short while it was read")
            got += n

    def views(self, offset: int, length: int) -> list[memoryview]:
        """`wire.Bytes`: a copy of that range, good until the next call."""
        if len(self._buffer) < length:
            self._buffer = memoryview(bytearray(length))
        self.read_into(self._buffer[:length], offset)
        return [self._buffer[:length]]

    def damage(self, header: Header) -> str:
        """Recompute every checksum: what is wrong, as a sentence; "" if every byte is the published one. Raises
        SnapshotError when the file has become too short."""
        table = np.empty(table_bytes(header.payload_bytes) // 8, dtype="<u8")
        self.read_into(table.view(np.uint8).data, header.payload_bytes)
        if root_of(table) != header.root:
            return "the checksum table does not match its header"
        bad = []
        buffer = memoryview(bytearray(min(CHUNK_BYTES, header.payload_bytes)))
        for index, (digest, (start, stop)) in enumerate(zip(table, chunks(header.payload_bytes), strict=True)):
            self.read_into(buffer[: stop - start], start)
            if xxhash.xxh3_64_intdigest(buffer[: stop - start]) != digest:
                bad.append(index)
        if self.header() != header:
            return "it was overwritten while it was checked"
        return f"chunks {bad} do not match their checksums" if bad else ""


class BufferWriter:
    """Writes a buffer. One per file and process."""

    def __init__(self, path: Path, reserve_bytes: int = 0) -> None:
        """`reserve_bytes`: host memory to leave free."""
        self.path, self._reserve_bytes = path, reserve_bytes
        self._fd = -1
        self._map: mmap.mmap | None = None

    def reserve(self, payload_bytes: int) -> None:
        """Make room for a payload, allocated and prefaulted. Wipes what the file held if it must grow or be reopened.

        Raises SnapshotError when there is no room or no permission; its size is then as before, its content maybe gone.
        """
        if self._map is not None and file_bytes(payload_bytes) <= len(self._map):
            mine = os.fstat(self._fd)
            if mine.st_nlink > 0 and mine.st_size >= len(self._map):  # nobody has removed or cut it
                return
        self.release()
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            os.pwrite(self._fd, bytes(_PREFIX.size), 0)
            size = os.fstat(self._fd).st_size
            want = file_bytes(payload_bytes + SPARE_BYTES)
            allocate(self._fd, self.path, want, self._reserve_bytes)
            self._map = mmap.mmap(self._fd, max(size, want))
            with contextlib.suppress(OSError):
                # First touch costs four times as much as a copy into memory that is there; it is paid here, once. In
                # slices, as no other thread of the process runs during a call.
                for at in range(0, len(self._map), POPULATE_BYTES):
                    self._map.madvise(_MADV_POPULATE_WRITE, at, min(POPULATE_BYTES, len(self._map) - at))
        except (OSError, SnapshotError) as error:
            self.release()
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"{self.path} cannot be made: {error.strerror} (snapshot.segment_dir)") from error

    def begin(self) -> None:
        """Wipe the header. From here to `publish` the buffer holds nothing."""
        assert self._map is not None
        self._map[: _PREFIX.size] = bytes(_PREFIX.size)

    def payload(self, payload_bytes: int) -> np.ndarray:
        """The memory to write the payload into, between `begin` and `publish`: uint8 [payload_bytes]."""
        assert self._map is not None
        return np.frombuffer(self._map, dtype=np.uint8, count=payload_bytes, offset=HEADER_BYTES)

    def publish(self, header: Header, table: np.ndarray) -> Header:
        """Write table and header. `header` without its root, which is filled in; the whole one is
        returned."""
        assert self._map is not None
        whole = replace(header, root=root_of(table))
        at = HEADER_BYTES + header.payload_bytes
        packed = _pack_header(whole)
        self._map[at : at + table.nbytes] = table.astype("<u8", copy=False).tobytes()
        # The magic goes last: until then the header is nothing to any reader.
        self._map[len(MAGIC) : len(packed)] = packed[len(MAGIC) :]
        self._map[: len(MAGIC)] = packed[: len(MAGIC)]
        return whole

    def release(self) -> None:
        """Unmap and close. The file stays."""
        self._map = None  # unmapped with the last view of it; close() would fail while there is one
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
