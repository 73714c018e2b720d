"""Files of workers' states: a reader gets the state that was written for this worker, round, history, rank and run."""

import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from everstep.semi.worker_store import StateKey, WorkerStore
from everstep.snapshot import worker_states

TOKEN, SIZE = b"t" * 32, 5000
STATE = bytes(range(250)) * (SIZE // 250)
KEY = StateKey(worker=1, round=7, history=0xABC)
DEADLINE_S = 30.0


@dataclass
class Hosts:
    """The memory of this host and of another one."""

    folder: Path
    other: Path | None = None

    def write(self, name, *data):
        worker_states.write(self.folder, name, *data, older=worker_states.OLDER)

    def copy(self, name, *data):
        if self.other is not None:
            worker_states.write(self.other, name, *data, older=worker_states.OLDER_COPIES)
        return self.other is not None

    def fetch(self, name, size):
        is_there = self.other is not None and (self.other / name).exists()
        return (self.other / name).read_bytes() if is_there else None


def files(folder, rank=0, whose="run 1, 2 ranks", token=TOKEN, nbytes=SIZE, other=None):
    return WorkerStore(Hosts(folder, other), rank=rank, whose=whose, nbytes=nbytes, token=token)


def write(store, key, state):
    store.begin_write(key, state)
    store.finish_copies(DEADLINE_S)


@pytest.mark.parametrize(("place", "reader"), [
    *(({change: value}, {}) for change, value in {"worker": 2, "round": 8, "history": 0xABD}.items()),
    *(({}, {change: value}) for change, value in {"rank": 1, "whose": "run 2", "token": b"u" * 32}.items()),
])  # fmt: skip
def test_a_file_of_something_else_is_no_state_by_any_name(tmp_path, place, reader):
    store, reader, other = files(tmp_path), files(tmp_path, **reader), replace(KEY, **place)
    write(store, KEY, STATE)
    if reader.name(other) != store.name(KEY):
        assert not reader.in_memory(other)
        (tmp_path / store.name(KEY)).rename(tmp_path / reader.name(other))
    assert reader.in_memory(other)
    assert reader.read(other) is None


@pytest.mark.parametrize(("round_", "over"), [
    (5, True),  # more than one round older than the newest
    (6, False),
    (8, False),  # a later state, of a commit that this group has missed
])  # fmt: skip
def test_a_state_is_kept_as_long_as_somebody_may_go_on_from_it(tmp_path, round_, over):
    store, known = files(tmp_path), replace(KEY, round=round_)
    other = replace(known, worker=11)
    for key in (known, other):
        write(store, key, STATE)
    draft = tmp_path / f".{store.name(known)}-0123.tmp"
    draft.write_bytes(b"torn")
    write(store, KEY, STATE)
    assert store.in_memory(known) == draft.exists() == (not over)
    assert files(tmp_path).read(KEY) == STATE, "by any group"
    assert store.in_memory(other)
    write(store, newer := replace(KEY, round=8), STATE)
    assert store.in_memory(newer)
    assert store.in_memory(other) == (not over), "no group can go on from it, wherever its worker is now"


def test_a_state_is_in_the_memory_of_another_host_when_this_one_has_it_no_more(tmp_path):
    (here := tmp_path / "here").mkdir()
    (other := tmp_path / "other").mkdir()
    store = files(here, other=other)
    write(store, KEY, STATE)
    shutil.rmtree(here)
    assert store.copied_bytes == SIZE
    reader = files(here, other=other)
    assert not reader.in_memory(KEY)
    assert reader.read(KEY) == STATE
    copy = other / store.name(KEY)
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    assert reader.read(KEY) is None


def test_a_host_that_takes_no_copies_is_told_of_and_not_waited_for(tmp_path, monkeypatch):
    store, begun = files(tmp_path), threading.Event()
    monkeypatch.setattr(Hosts, "copy", lambda *_: begun.set() or threading.Event().wait())
    for round_ in (7, 8, 9):
        store.hold(key := replace(KEY, round=round_), STATE)
        before = time.monotonic()
        why = store.begin_writes(round_, DEADLINE_S)
        assert time.monotonic() - before < DEADLINE_S / 2
        assert begun.wait(DEADLINE_S)
        while not store.in_memory(key):
            assert time.monotonic() - before < DEADLINE_S
            time.sleep(0.01)
    assert "the copy takes longer than a round" in why
    assert store.has_memory
    assert sorted(int(path.name.split(".")[2].partition("-")[2]) for path in tmp_path.iterdir()) == [8, 9]


def test_who_leaves_copies_its_newest_states_even_if_an_older_copy_never_ends(tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(
        Hosts, "copy", lambda _, name, *__: ("round-7" in name and threading.Event().wait()) or copied.append(name)
    )
    store = files(tmp_path)
    for round_ in (7, 8, 9):
        store.hold(key := replace(KEY, round=round_), STATE)
        store.begin_writes(round_, 0.0)
    store.finish_copies(DEADLINE_S)
    assert copied == [store.name(key)]


def test_a_copy_that_fails_in_any_way_is_told_of_and_made_again_by_who_leaves(tmp_path):
    store = files(tmp_path, other="no Path")
    write(store, KEY, STATE)
    store.hold(replace(KEY, round=8), STATE)
    assert "has no copy: unsupported operand" in store.begin_writes(8, DEADLINE_S)
    store.finish_copies(DEADLINE_S)
    store._memory.other = tmp_path / "other"
    store.finish_copies(DEADLINE_S)
    assert (tmp_path / "other" / store.name(replace(KEY, round=8))).exists()
