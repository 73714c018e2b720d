"""The workers' states in files: what is read is what was written, for what it was written."""

import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from everstep.semi import worker_store
from everstep.semi.worker_store import Place, WorkerStore

TOKEN, SIZE = b"t" * 32, 5000
PLACE = Place(worker=1, round=7, history=0xABC)
DEADLINE_S = 30.0


@dataclass
class Hosts:
    """Memory of this host, and of another one."""

    folder: Path
    other: Path | None = None

    def elsewhere(self, name, size):
        return self.other is not None and (self.other / name).exists()

    def fetch(self, name, size):
        return (self.other / name).read_bytes() if self.elsewhere(name, size) else None


def files(folder, rank=0, whose="run 1, 2 ranks", token=TOKEN, nbytes=SIZE, memory=None):
    return WorkerStore(folder, memory or Hosts(folder / "none"), rank=rank, whose=whose, nbytes=nbytes, token=token)


def write(store, place, state):
    store.begin_write(place, state)
    store.settle(DEADLINE_S)


@pytest.fixture
def state():
    return bytes(range(250)) * (SIZE // 250)


def test_a_state_is_read_as_it_was_written(tmp_path, state):
    write(files(tmp_path), PLACE, state)
    other_group = files(tmp_path)
    assert other_group.on_storage(PLACE)
    assert other_group.read(PLACE) == state


@pytest.mark.parametrize(
    ("place", "reader"),
    [
        *(({change: value}, {}) for change, value in {"worker": 2, "round": 8, "history": 0xABD}.items()),
        *(({}, {change: value}) for change, value in {"rank": 1, "whose": "run 2", "token": b"u" * 32}.items()),
    ],
)
def test_a_file_of_something_else_is_no_state_by_any_name(tmp_path, state, place, reader):
    store, reader, other = files(tmp_path), files(tmp_path, **reader), replace(PLACE, **place)
    write(store, PLACE, state)
    if reader.path(other) != store.path(PLACE):
        assert not reader.on_storage(other)
        store.path(PLACE).rename(reader.path(other))
    assert reader.on_storage(other)
    assert reader.read(other) is None


@pytest.mark.parametrize(
    ("round_", "over"),
    [
        (4, True),  # nobody remembers the rounds since
        (5, False),
        (8, False),  # this group has missed a commit
    ],
)
def test_a_state_is_kept_as_long_as_somebody_may_go_on_from_it(tmp_path, state, round_, over):
    store, known = files(tmp_path), replace(PLACE, round=round_)
    other = replace(known, worker=11)
    for place in (known, other):
        write(store, place, state)
    draft = tmp_path / f".{store.path(known).name}-0123.tmp"
    draft.write_bytes(b"torn")
    write(store, PLACE, state)
    assert store.on_storage(known) == draft.exists() == (not over)
    assert store.on_storage(PLACE)
    assert store.on_storage(other)


@pytest.mark.parametrize("where", ["on this host", "on another host"])
def test_a_state_is_in_the_memory_of_a_host_when_the_storage_has_it_no_more(tmp_path, state, where):
    storage, memory, other = (tmp_path / name for name in ("storage", "memory", "other"))
    memory.mkdir()
    store = files(storage, memory=Hosts(memory))
    write(store, PLACE, state)
    shutil.rmtree(storage)
    if where == "on another host":
        memory.rename(other)
    reader = files(storage, memory=Hosts(memory, other if other.exists() else None))
    assert store.in_memory(PLACE) == (where == "on this host")
    assert reader.has(PLACE)
    assert reader.read(PLACE) == state
    place = (memory if memory.exists() else other) / store.path(PLACE).name
    place.write_bytes(place.read_bytes()[:-1] + b"?")
    assert reader.read(PLACE) is None


def test_a_storage_that_stands_still_is_not_waited_for_where_memory_has_the_state(tmp_path, state, monkeypatch):
    (memory := tmp_path / "memory").mkdir()
    store, begun = files(tmp_path / "storage", memory=Hosts(memory)), threading.Event()
    whole = worker_store.write_whole

    def slow(path, *data):
        if path.parent != memory:
            begun.set()
            threading.Event().wait()
        whole(path, *data)

    monkeypatch.setattr(worker_store, "write_whole", slow)
    for round_ in (7, 8, 9):
        store.hold(place := replace(PLACE, round=round_), state)
        before = time.monotonic()
        why = store.keep(round_, DEADLINE_S)
        assert time.monotonic() - before < DEADLINE_S / 2
        assert begun.wait(DEADLINE_S)
        while not store.in_memory(place):
            assert time.monotonic() - before < DEADLINE_S
            time.sleep(0.01)
    assert "the storage takes longer than a round" in why
    assert sorted(int(path.name.split(".")[2].partition("-")[2]) for path in memory.iterdir()) == [8, 9]
