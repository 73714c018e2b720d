"""The workers' states in the run directory: what is read is what was written, for what it was written."""

import os
import threading
from dataclasses import replace

import pytest

from everstep.semi.worker_files import Place, WorkerFiles
from everstep.semi.worker_states import WorkerStates

TOKEN, SIZE = b"t" * 32, 5000
PLACE = Place(worker=1, round=7, history=0xABC)
DEADLINE_S = 60.0


def files(folder, rank=0, whose="run 1, 2 ranks", token=TOKEN, nbytes=SIZE):
    return WorkerFiles(folder, rank=rank, whose=whose, nbytes=nbytes, token=token)


def write(store, place, state, keep_round=0):
    store.write(place, state, keep_round=keep_round)


@pytest.fixture
def state():
    return bytes(range(250)) * (SIZE // 250)


def test_a_state_is_read_as_it_was_written(tmp_path, state):
    write(files(tmp_path), PLACE, state)
    other_group = files(tmp_path)
    assert other_group.has(PLACE)
    assert other_group.of(1) == [PLACE]
    assert other_group.read(PLACE) == state


@pytest.mark.parametrize("change", [{"worker": 2}, {"round": 8}, {"history": 0xABD}])
def test_a_file_under_another_name_is_no_state(tmp_path, state, change):
    store, other = files(tmp_path), replace(PLACE, **change)
    write(store, PLACE, state)
    assert other not in store.of(other.worker)
    store.path(PLACE).rename(store.path(other))
    assert other in store.of(other.worker)
    assert store.read(other) is None


@pytest.mark.parametrize("change", [{"rank": 1}, {"whose": "run 2, 2 ranks"}, {"token": b"u" * 32}])
def test_a_file_of_another_rank_run_or_layout_is_no_state(tmp_path, state, change):
    write(files(tmp_path), PLACE, state)
    reader = files(tmp_path, **change)
    if reader.path(PLACE) != files(tmp_path).path(PLACE):
        files(tmp_path).path(PLACE).rename(reader.path(PLACE))
    assert reader.read(PLACE) is None


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"x" + d[1:], lambda d: d[:-1] + b"x"]
)
def test_a_damaged_file_is_no_state(tmp_path, state, damage):
    store = files(tmp_path)
    write(store, PLACE, state)
    path = store.path(PLACE)
    path.write_bytes(damage(path.read_bytes()))
    assert store.read(PLACE) is None


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
    write(store, PLACE, state, keep_round=5)
    assert set(store.of(1)) == {PLACE} | ({known} - {known for _ in [0] if over})
    assert draft.exists() != over
    assert store.of(11) == [other]


class SlowDisk(WorkerFiles):
    """A storage that stands still until it is told to go on."""

    def __init__(self, folder):
        super().__init__(folder, rank=0, whose="x", nbytes=SIZE, token=TOKEN)
        self.goes, self.begun = threading.Event(), []

    def write(self, place, parts, **keep):
        self.begun.append(place)
        assert self.goes.wait(DEADLINE_S)
        super().write(place, parts, **keep)


def test_a_slow_storage_is_waited_for_before_the_host_fills_up(tmp_path, state):
    """At most two states of a worker are to be written; while there are two, the next round waits."""
    disk = SlowDisk(tmp_path)
    store = WorkerStates(disk)
    rounds = [replace(PLACE, round=round_) for round_ in range(1, 21)]
    for place in rounds:
        store.save(place, state)
        assert (store.behind() == "") == (place.round == 1)
        assert not store.catch_up(0.0) or place.round == 1
    assert "worker 1 after round 0 " in store.behind()
    assert str(tmp_path) in store.behind()
    disk.goes.set()
    assert store.catch_up(DEADLINE_S)
    assert store.settle(DEADLINE_S)
    assert disk.begun in ([rounds[0], rounds[-1]], [rounds[-1]]), "those between gave way"
    assert store.read(rounds[-1]) == state


def test_a_full_storage_is_tried_again(tmp_path, state):
    (tmp_path / "workers").touch()
    store = WorkerStates(files(tmp_path / "workers"))
    for place in (PLACE, replace(PLACE, round=8)):
        store.save(place, state)
    assert not store.catch_up(0.1)
    assert os.strerror(20) in store.behind() or os.strerror(17) in store.behind()
    (tmp_path / "workers").unlink()
    assert store.catch_up(DEADLINE_S)
    assert store.settle(DEADLINE_S)
    assert store.read(replace(PLACE, round=8)) == state


def test_a_state_is_held_until_a_newer_one_is_on_storage(tmp_path, state):
    store = WorkerStates(files(tmp_path))
    rounds = [replace(PLACE, round=round_) for round_ in range(5, 10)]
    store.hold(rounds[1], state)
    store.let_go(rounds)
    assert store.read(rounds[1]) == state
    store.let_go(rounds[2:])
    assert store.read(rounds[1]) is None, "nobody knows that round any more"
    store.hold(rounds[1], state)
    store.save(rounds[2], state)
    assert store.settle(DEADLINE_S)
    store.let_go(rounds)
    assert not store.holds(1, rounds[1].round)
