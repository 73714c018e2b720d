"""The workers' states in the run directory: what is read is what was written, for what it was written."""

import os
import threading
from dataclasses import replace

import pytest

from everstep.semi.worker_store import Place, WorkerStore

TOKEN, SIZE = b"t" * 32, 5000
PLACE = Place(worker=1, round=7, history=0xABC)
DEADLINE_S = 60.0


def files(folder, rank=0, whose="run 1, 2 ranks", token=TOKEN, nbytes=SIZE):
    return WorkerStore(folder, rank=rank, whose=whose, nbytes=nbytes, token=token)


@pytest.fixture
def state():
    return bytes(range(250)) * (SIZE // 250)


def test_a_state_is_read_as_it_was_written(tmp_path, state):
    files(tmp_path).write(PLACE, state)
    other_group = files(tmp_path)
    assert other_group.on_storage(PLACE)
    assert other_group.read(PLACE) == state


@pytest.mark.parametrize("change", [{"worker": 2}, {"round": 8}, {"history": 0xABD}])
def test_a_file_under_another_name_is_no_state(tmp_path, state, change):
    store, other = files(tmp_path), replace(PLACE, **change)
    store.write(PLACE, state)
    assert not store.on_storage(other)
    store.path(PLACE).rename(store.path(other))
    assert store.on_storage(other)
    assert store.read(other) is None


@pytest.mark.parametrize("change", [{"rank": 1}, {"whose": "run 2, 2 ranks"}, {"token": b"u" * 32}])
def test_a_file_of_another_rank_run_or_layout_is_no_state(tmp_path, state, change):
    files(tmp_path).write(PLACE, state)
    reader = files(tmp_path, **change)
    if reader.path(PLACE) != files(tmp_path).path(PLACE):
        files(tmp_path).path(PLACE).rename(reader.path(PLACE))
    assert reader.read(PLACE) is None


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
        store.write(place, state)
    draft = tmp_path / f".{store.path(known).name}-0123.tmp"
    draft.write_bytes(b"torn")
    store.write(PLACE, state)
    assert store.on_storage(known) == draft.exists() == (not over)
    assert store.on_storage(PLACE)
    assert store.on_storage(other)


class SlowStorage(WorkerStore):
    """A storage that stands still until it is told to go on."""

    def __init__(self, folder):
        super().__init__(folder, rank=0, whose="x", nbytes=SIZE, token=TOKEN)
        self.goes, self.begun = threading.Event(), []

    def write(self, place, state):
        self.begun.append(place)
        assert self.goes.wait(DEADLINE_S)
        super().write(place, state)


def keep(store, place, state, timeout_s=0.0):
    """A round is committed."""
    store.hold(place, state)
    return store.keep(place.round, timeout_s)


def test_a_slow_storage_is_told_of_and_does_not_fill_the_host(tmp_path, state):
    """One state of a worker is written at a time, and the newest is held."""
    store = SlowStorage(tmp_path)
    rounds = [replace(PLACE, round=round_) for round_ in range(1, 21)]
    for place in rounds:
        assert (keep(store, place, state) == "") == (place.round == 1)
    why = store.keep(20, 0.0)
    assert "worker 1 " in why
    assert str(tmp_path) in why
    assert "takes longer than a round" in why
    store.goes.set()
    store.settle(DEADLINE_S)
    newest = replace(PLACE, round=21)
    assert keep(store, newest, state) != "", "the state before it was never written"
    store.settle(DEADLINE_S)
    assert store.begun == [rounds[0], newest], "those between gave way"
    assert files(tmp_path, whose="x").read(newest) == state


def test_a_full_storage_is_tried_again_with_the_next_round(tmp_path, state):
    (tmp_path / "workers").touch()
    store = files(tmp_path / "workers")
    assert keep(store, PLACE, state) == ""
    why = keep(store, replace(PLACE, round=8), state, DEADLINE_S)
    assert os.strerror(20) in why or os.strerror(17) in why
    (tmp_path / "workers").unlink()
    for round_ in (9, 10):  # the write of round 8 may have failed before
        why = keep(store, replace(PLACE, round=round_), state, DEADLINE_S)
    assert why == ""
    store.settle(DEADLINE_S)
    assert files(tmp_path / "workers").read(replace(PLACE, round=10)) == state


def test_a_state_is_held_until_a_newer_one_is_on_storage(tmp_path, state):
    store = files(tmp_path)
    rounds = [replace(PLACE, round=round_) for round_ in range(5, 10)]
    store.hold(rounds[1], state)
    store.let_go(rounds)
    assert store.read(rounds[1]) == state
    store.let_go(rounds[2:])
    assert store.read(rounds[1]) is None, "nobody knows that round any more"
    store.hold(rounds[1], state)
    store.write(rounds[2], state)
    store.let_go(rounds)
    assert not store.holds(1, rounds[1].round)
