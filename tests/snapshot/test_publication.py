"""After a death at any point of a publication, a reader finds the step before, the new one or none, but no mixture."""

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from everstep.snapshot.buffer import CHUNK_BYTES, BufferReader, BufferWriter, Header, chunk_digests, root_of

SIZE = CHUNK_BYTES + 70_001


def payload_of(step: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 256, size, dtype=np.uint8)


def publish(writer: BufferWriter, step: int, size: int = SIZE) -> None:
    """Publish as the copier does, in pieces so small that a death can fall between them."""
    writer.reserve(size)
    writer.begin()
    payload, data = writer.payload(size), payload_of(step, size)
    for start in range(0, size, 65_536):
        payload[start : start + 65_536] = data[start : start + 65_536]
    header = Header(
        run="r", kind="data", group=0, rank=0, ranks=1, step=step, history=1, shared_by=((0, 0),),
        parity=0, parity_group=(0,), topology="t", state_bytes=size, part=(0, size), sequence=step,
        last_section=size, payload_bytes=size,
    )  # fmt: skip
    writer.publish(header, chunk_digests(payload.data))


def readable_step(path: Path) -> int | None:
    """Return the step that a reader accepts, and check that it has the bytes of that step; None if there is none."""
    reader = BufferReader(path)
    header = reader.header()
    if header is None or reader.damage(header):
        reader.close()
        return None
    data = np.empty(header.payload_bytes, dtype=np.uint8)
    reader.read_into(data.data, 0)
    reader.close()
    if root_of(chunk_digests(data.data)) != header.root:
        return None  # overwritten since; a restore, too, verifies the bytes that it copied
    assert np.array_equal(data, payload_of(header.step, header.payload_bytes)), "a wrong state passed every check"
    return header.step


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="everstep-test-", dir="/dev/shm") as name:
        yield Path(name)


def run_to_line(action, last: int | None) -> int:
    """Run `action`, and die before the `last`-th line of the buffer module or of this one. Return how many ran."""
    count = 0

    def tracer(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.endswith(("buffer.py", "test_publication.py")):
            return None
        count += event == "line"
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return tracer

    sys.settrace(tracer)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_line_of_a_publication_the_buffer_holds_one_step_or_none(folder, every):
    buffers = [folder / "buffer-0", folder / "buffer-1"]

    def take(step: int) -> None:
        publish(BufferWriter(buffers[step % 2]), step)

    take(1)
    take(2)
    total = run_to_line(lambda: take(3), None)
    assert total > 60
    found = []
    for number in [*range(1, total + 1, every), total + 1]:
        take(1)
        if (pid := os.fork()) == 0:
            gc.disable()  # a lighthouse that another test left would wait here for threads that this process has not
            run_to_line(lambda: take(3), number)
            os._exit(0)
        os.waitpid(pid, 0)
        found.append(readable_step(buffers[1]))
        assert readable_step(buffers[0]) == 2, "the other buffer must not suffer"
    assert found[0] == 1, "before the first line nothing has changed"
    assert found[-1] == 3, "after the last line all has"
    assert set(found) == {1, None, 3}
    # Once gone, the old step never comes back; once there, the new one stays.
    order = {1: 0, None: 1, 3: 2}
    assert found == sorted(found, key=lambda step: order[step])
