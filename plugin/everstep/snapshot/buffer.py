"""A buffer: one file on tmpfs that holds one step's payload, or nothing that a reader accepts.

    [0, 16 KiB)  header: magic, length and XXH3 of a JSON body, the body
    [16 KiB, …)  payload
    after it     table: the XXH3-64 of every MiB of the payload

The writer wipes the old header, then writes the payload, the table, and last the header with the XXH3 of the table
(`root`). So an intact header vouches for the table, and the table for every byte. If the header is the same before and
after a read, all that was read belongs to one step. This relies on checksums and not on the order in which other
processes see the writes, so it also holds on CPUs that reorder stores.

Trainers (and keepers, for parity) write through a memory mapping. Readers use only `pread`: if the file is truncated
while they read, `pread` returns fewer bytes, where a mapping would raise SIGBUS.

Other processes need host memory too, so a writer checks how much is free before it allocates more.
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

from everstep.run.files import open_regular
from everstep.run.memory import free_memory
from everstep.snapshot.header import Header

BUFFERS = 2
"""Data buffers of a rank, and also its parity buffers: one for the newest coded snapshot, one for the next."""
STEP_BYTES, POPULATE_BYTES = 64 << 20, 2 << 20
ENLARGE = "snapshot.segment_dir; Docker: --shm-size"


class SnapshotError(RuntimeError):
    """A buffer cannot be allocated, written or trusted, or a keeper not started. The message says which and why."""


def allocate(fd: int, path: Path, size: int, reserve_bytes: int) -> None:
    """Allocate memory for a file on tmpfs up to `size`, STEP_BYTES at a time, and check before each whether the rest
    fits. So each of several processes that allocate at once takes at most STEP_BYTES too much, from the reserve.

    Raises SnapshotError, with the bytes needed, or OSError; the file then has its previous size.
    """
    had, at = os.fstat(fd).st_size, 0
    try:
        for at in range(had, size, STEP_BYTES):
            check_room(path.parent, size - at, reserve_bytes)
            # Without this, a full tmpfs would raise SIGBUS in the middle of a copy.
            os.posix_fallocate(fd, at, min(STEP_BYTES, size - at))
    except BaseException as error:
        os.ftruncate(fd, had)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # another process took it meanwhile
            raise SnapshotError(
                f"snapshots need {size - at} bytes more, and {path.parent} is full ({ENLARGE})"
            ) from error
        raise


def check_room(directory: Path, bytes_needed: int, reserve_bytes: int) -> None:
    """Raise SnapshotError, with bytes needed and found, if `bytes_needed` more in `directory` would not fit into the
    tmpfs, or would not leave `reserve_bytes` free on the host and under this control group's limit."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise SnapshotError(f"{directory} cannot be used: {error.strerror} (snapshot.segment_dir)") from error
    free, where = free_memory()
    in_tmpfs = status.f_bavail * status.f_frsize, f"free in {directory} ({ENLARGE})"
    least, where = min((free - reserve_bytes, f"{where} beyond snapshot.memory_reserve_gb"), in_tmpfs)
    if bytes_needed > least:
        raise SnapshotError(f"snapshots need {bytes_needed} bytes more, and there are {max(least, 0)} bytes {where}")


MAGIC = b"evsbuf01"
HEADER_BYTES = 16 << 10
CHUNK_BYTES = 1 << 20
"""Bytes under one checksum, and the part of each shard that coding holds at a time."""
SPARE_BYTES = 16 << 10
"""Bytes by which a file is larger than its payload needs. What a snapshot holds beside tensors grows and shrinks by a
few bytes from step to step, and reallocating the file costs as much as the copy."""
_PREFIX = struct.Struct("<8sIQ")
_MADV_POPULATE_WRITE = 23  # Linux >= 5.14, elsewhere an error; absent from Python's mmap


def chunks(payload_bytes: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each chunk of a payload: one MiB each, the last may be shorter."""
    return [(at, min(at + CHUNK_BYTES, payload_bytes)) for at in range(0, payload_bytes, CHUNK_BYTES)]


def table_bytes(payload_bytes: int) -> int:
    """Return the size of a payload's chunk table."""
    return -(-payload_bytes // CHUNK_BYTES) * 8


def file_bytes(payload_bytes: int) -> int:
    """Return the minimum size of a file with this payload."""
    return HEADER_BYTES + payload_bytes + table_bytes(payload_bytes)


def chunk_digests(payload: memoryview) -> np.ndarray:
    """Return the chunk table of a payload in memory: uint64, one per chunk."""
    return as_table([xxhash.xxh3_64_intdigest(payload[a:b]) for a, b in chunks(len(payload))])


def as_table(digests: Sequence[int]) -> np.ndarray:
    """Return the chunk table with these digests."""
    return np.array(digests, dtype="<u8")


def root_of(table: np.ndarray) -> str:
    """Return the digest that vouches for a chunk table (`Header.root`)."""
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
    """Parse a header. Cached, because a process that waits for the next snapshot reads the same header many times."""
    try:
        return Header.from_json(json.loads(body))
    except (ValueError, RecursionError):
        return None  # another schema version, or forged: this version may not use it


class BufferReader:
    """Reads a buffer that another process may be overwriting or deleting."""

    def __init__(self, path: Path, payload_bytes: int = 0) -> None:
        """`payload_bytes`: size of the payload to serve. Raises OSError if the file cannot be opened or is not regular
        (a read from a pipe would block)."""
        self.path, self.size = path, payload_bytes + table_bytes(payload_bytes)
        with open_regular(path) as file:
            self._fd = os.dup(file.fileno())
        self._buffer = memoryview(b"")

    def close(self) -> None:
        os.close(self._fd)

    def header(self) -> Header | None:
        """Return the header; None if the file is empty, being written, damaged, truncated or of another version."""
        header = _unpack_header(os.pread(self._fd, HEADER_BYTES, 0))
        short = header is None or os.fstat(self._fd).st_size < file_bytes(header.payload_bytes)
        return None if short else header

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from payload and table, end to end, from `offset` on. Raises SnapshotError if it is truncated."""
        got = 0
        while got < len(view):
            n = os.preadv(self._fd, [view[got:]], HEADER_BYTES + offset + got)
            if n == 0:
                raise SnapshotError(f"{self.path} was truncated while it was read")
            got += n

    def views(self, offset: int, length: int) -> list[memoryview]:
        """Return a copy of that range, valid until the next call (see `wire.Bytes`)."""
        if len(self._buffer) < length:
            self._buffer = memoryview(bytearray(length))
        self.read_into(self._buffer[:length], offset)
        return [self._buffer[:length]]

    def damage(self, header: Header) -> str:
        """Recompute every checksum. Returns what is wrong as a sentence; "" if every byte is as published. Raises
        SnapshotError if the file was truncated."""
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
    """Writes a buffer. A process must use one writer per file."""

    def __init__(self, path: Path, reserve_bytes: int = 0) -> None:
        """`reserve_bytes`: host memory to leave free."""
        self.path, self._reserve_bytes = path, reserve_bytes
        self._fd = -1
        self._map: mmap.mmap | None = None

    def reserve(self, payload_bytes: int) -> None:
        """Allocate and prefault room for a payload. Wipes what the file held if it must grow or be reopened.

        Raises SnapshotError without room or permission. The file then has its old size, but its content may be gone.
        """
        if self._map is not None and file_bytes(payload_bytes) <= len(self._map):
            mine = os.fstat(self._fd)
            if mine.st_nlink > 0 and mine.st_size >= len(self._map):  # not removed or truncated
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
                # The first touch of a page costs four times as much as a copy into it later. Pay it here, once, and in
                # slices, because no other thread of this process runs during a call.
                for at in range(0, len(self._map), POPULATE_BYTES):
                    self._map.madvise(_MADV_POPULATE_WRITE, at, min(POPULATE_BYTES, len(self._map) - at))
        except (OSError, SnapshotError) as error:
            self.release()
            if isinstance(error, SnapshotError):
                raise
            raise SnapshotError(f"{self.path} cannot be made: {error.strerror} (snapshot.segment_dir)") from error

    def begin(self) -> None:
        """Wipe the header. From now until `publish` the buffer holds nothing that a reader accepts."""
        assert self._map is not None
        self._map[: _PREFIX.size] = bytes(_PREFIX.size)

    def payload(self, payload_bytes: int) -> np.ndarray:
        """Return the memory to write the payload to, between `begin` and `publish`: uint8 [payload_bytes]."""
        assert self._map is not None
        return np.frombuffer(self._map, dtype=np.uint8, count=payload_bytes, offset=HEADER_BYTES)

    def publish(self, header: Header, table: np.ndarray) -> Header:
        """Write the table, then the header. Fills in the root, which `header` lacks. Returns the whole header."""
        assert self._map is not None
        whole = replace(header, root=root_of(table))
        at = HEADER_BYTES + header.payload_bytes
        packed = _pack_header(whole)
        self._map[at : at + table.nbytes] = table.astype("<u8", copy=False).tobytes()
        # The magic is written last: no reader accepts the header before that.
        self._map[len(MAGIC) : len(packed)] = packed[len(MAGIC) :]
        self._map[: len(MAGIC)] = packed[: len(MAGIC)]
        return whole

    def release(self) -> None:
        """Unmap and close. The file stays."""
        self._map = None  # unmapped when its last view goes; close() would raise while there is one
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
