"""Death at every point of a publication: a reader finds the step before, the new one, or nothing. Never a
mixture."""

import os
import random
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from everstep.snapshot.buffer import (
    CHUNK_BYTES,
    BufferReader,
    BufferWriter,
    Header,
    SnapshotError,
    chunk_digests,
    root_of,
)

SIZE = CHUNK_BYTES + 70_001


def header_of(step: int, size: int = SIZE) -> Header:
    return Header(
        run="r", kind="data", group=0, rank=0, ranks=1, step=step, history=1, members=(0,), parity=0, parity_group=(0,),
        topology="t", state_bytes=size, part=(0, size), sequence=step,
        sections={"part": (0, size), "own": (size, size), "layout": (size, size)},
        taken_at=0.0,
        payload_bytes=size,
    )  # fmt: skip


def payload_of(step: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 256, size, dtype=np.uint8)


def publish(writer: BufferWriter, step: int, size: int = SIZE) -> None:
    """What the copier does, in pieces small enough to die between."""
    writer.reserve(size)
    writer.begin()
    payload, data = writer.payload(size), payload_of(step, size)
    for start in range(0, size, 65_536):
        payload[start : start + 65_536] = data[start : start + 65_536]
    writer.publish(header_of(step, size), chunk_digests(payload.data))


def what_is_there(path: Path) -> int | None:
    """The step that a reader believes in, checked against what that step's bytes must be."""
    reader = BufferReader(path)
    header = reader.header()
    if header is None or reader.damage(header):
        reader.close()
        return None
    data = np.empty(header.payload_bytes, dtype=np.uint8)
    reader.read_into(data.data, 0)
    reader.close()
    if root_of(chunk_digests(data.data)) != header.root:
        return None  # overwritten since: what restores looks at what it copied, too
    assert np.array_equal(data, payload_of(header.step, header.payload_bytes)), "a wrong state passed every check"
    return header.step


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="everstep-test-", dir="/dev/shm") as name:
        yield Path(name)


def lines_of(action) -> int:
    """How many lines of the buffer module an action runs through."""
    count = 0

    def tracer(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.endswith(("buffer.py", "test_publication.py")):
            return None
        count += event == "line"
        return tracer

    sys.settrace(tracer)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


def die_at_line(action, number: int) -> None:
    """Run `action` in a forked child that is SIGKILLed before its `number`-th line; returns when it is
    dead."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def tracer(frame, event, arg):
            nonlocal count
            if not frame.f_code.co_filename.endswith(("buffer.py", "test_publication.py")):
                return None
            count += event == "line"
            if count >= number:
                os.kill(os.getpid(), signal.SIGKILL)
            return tracer

        sys.settrace(tracer)
        action()
        os._exit(0)
    os.waitpid(pid, 0)


def test_killed_at_every_line_of_a_publication_the_buffer_holds_one_step_or_none(folder):
    buffers = [folder / "buffer-0", folder / "buffer-1"]

    def take(step: int) -> None:
        publish(BufferWriter(buffers[step % 2]), step)

    take(1)
    take(2)
    total = lines_of(lambda: take(3))
    assert total > 60
    found = []
    for number in range(1, total + 2):
        take(1)
        die_at_line(lambda: take(3), number)
        found.append(what_is_there(buffers[1]))
        assert what_is_there(buffers[0]) == 2, "the other buffer must not suffer"
    assert found[0] == 1, "before the first line nothing has changed"
    assert found[-1] == 3, "after the last line all has"
    assert set(found) == {1, None, 3}
    # Once gone, the old step never comes back; once there, the new one stays.
    order = {1: 0, None: 1, 3: 2}
    assert found == sorted(found, key=lambda step: order[step])


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1000), marks=pytest.mark.slow)])
def test_seeded_deaths_never_leave_a_wrong_state(folder, seeds):
    path = folder / "buffer-0"
    for seed in seeds:
        chance = random.Random(seed)
        before, after = 2 * seed + 1, 2 * seed + 2
        sizes = [chance.choice([1, 4096, CHUNK_BYTES, SIZE]) for _ in range(2)]
        publish(BufferWriter(path), before, sizes[0])
        die_at_line(lambda: publish(BufferWriter(path), after, sizes[1]), chance.randint(1, 90))  # noqa: B023
        assert what_is_there(path) in (before, after, None)


def test_a_reader_beside_a_busy_writer_sees_only_whole_steps(folder):
    path = folder / "buffer-0"
    writer = BufferWriter(path)
    publish(writer, 1)
    over = threading.Event()

    def write() -> None:
        step = 1
        while not over.is_set():
            step += 1
            publish(writer, step)

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(150):
        what_is_there(path)  # checks what it finds
    over.set()
    thread.join()
    assert what_is_there(path) is not None


@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_bit_anywhere_is_noticed(folder, seed):
    path = folder / "buffer-0"
    publish(BufferWriter(path), 1, 50_000)
    chance = random.Random(seed)
    size = path.stat().st_size
    body = 20 + len(path.read_bytes()[20:65_536].rstrip(b"\0"))
    used = [*range(body), *range(65_536, 65_536 + 50_000 + 8)]
    at = chance.choice(used) if seed else 65_536 + 50_000 + 7
    assert at < size
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    assert what_is_there(path) is None


def test_no_bit_of_a_header_may_be_another(folder):
    path = folder / "buffer-0"
    publish(BufferWriter(path), 1, 64)
    whole = path.read_bytes()
    for at in range(20 + len(whole[20:65_536].rstrip(b"\0"))):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        assert BufferReader(path).header() is None, f"byte {at}"


def test_a_file_cut_short_is_nothing_at_every_length(folder):
    path = folder / "buffer-0"
    publish(BufferWriter(path), 1, 50_000)
    whole = path.read_bytes()[: 65_536 + 50_000 + 8]
    for length in (0, 10, 19, 20, 300, 65_536, 65_537, 115_000, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert what_is_there(path) is None
    path.write_bytes(whole)
    assert what_is_there(path) == 1


def test_a_buffer_of_another_schema_is_nothing(folder):
    path = folder / "buffer-0"
    writer = BufferWriter(path)
    writer.reserve(100)
    writer.payload(100)[:] = 0
    writer.publish(replace(header_of(1, 100), schema=99), chunk_digests(writer.payload(100).data))
    assert BufferReader(path).header() is None


def test_a_full_tmpfs_is_an_error_with_the_numbers_and_not_a_crash(folder):
    writer = BufferWriter(folder / "buffer-0")
    with pytest.raises(SnapshotError, match=r"need \d+ bytes more, and there are \d+ .*free"):
        writer.reserve(1 << 46)
    assert (folder / "buffer-0").stat().st_size < 4096
    publish(writer, 1)
    assert what_is_there(folder / "buffer-0") == 1
