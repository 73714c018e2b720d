"""The workers' states in the run directory: what is read is what was written, for what it was written."""

import os
import threading
from dataclasses import replace

import pytest

from everstep.semi.worker_files import Place, WorkerFiles, is_over
from everstep.semi.worker_states import WorkerStates

TOKEN, SIZE = b"t" * 32, 5000
PLACE = Place(worker=1, round=7, history=0xABC)
WITHIN = replace(PLACE, steps=5)
DEADLINE_S = 60.0


def files(folder, rank=0, whose="run 1, 2 ranks", token=TOKEN, nbytes=SIZE, most=SIZE):
    return WorkerFiles(folder, rank=rank, whose=whose, nbytes=nbytes, token=token, most=most)


def write(store, place, *parts, keep_round=0, keep_steps=0):
    store.write(place, [memoryview(part) for part in parts], keep_round=keep_round, keep_steps=keep_steps)


@pytest.fixture
def state():
    return bytes(range(250)) * (SIZE // 250)


def test_a_state_is_read_as_it_was_written(tmp_path, state):
    write(files(tmp_path), PLACE, state)
    write(files(tmp_path), WITHIN, state, b"where streams stand")
    other_group = files(tmp_path, most=SIZE + 100)
    assert other_group.has(PLACE)
    assert set(other_group.of(1)) == {PLACE, WITHIN}
    assert other_group.read(PLACE) == state
    assert other_group.read(WITHIN) == state + b"where streams stand"
    assert files(tmp_path, most=SIZE).read(WITHIN) is None, "longer than any"


@pytest.mark.parametrize("change", [{"worker": 2}, {"round": 8}, {"history": 0xABD}, {"steps": 50}])
@pytest.mark.parametrize("place", [PLACE, WITHIN])
def test_a_file_under_another_name_is_no_state(tmp_path, state, place, change):
    store, other = files(tmp_path), replace(place, **change)
    write(store, place, state)
    assert other not in store.of(other.worker)
    store.path(place).rename(store.path(other))
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
@pytest.mark.parametrize("place", [PLACE, WITHIN])
def test_a_damaged_file_is_no_state(tmp_path, state, place, damage):
    store = files(tmp_path, most=2 * SIZE)
    write(store, place, state)
    path = store.path(place)
    path.write_bytes(damage(path.read_bytes()))
    assert store.read(place) is None


@pytest.mark.parametrize(
    ("known", "written", "over"),
    [
        (replace(PLACE, round=4), PLACE, True),  # nobody remembers the rounds since
        (replace(PLACE, round=5), PLACE, False),
        (replace(PLACE, round=8), PLACE, False),  # this group has missed a commit
        (replace(WITHIN, round=6), PLACE, True),  # its round is over
        (WITHIN, PLACE, False),
        (replace(WITHIN, steps=2), WITHIN, True),
        (replace(WITHIN, steps=3), WITHIN, False),  # of the last two one is whole on all ranks
        (replace(WITHIN, steps=2, history=1), WITHIN, False),
        (replace(WITHIN, round=8, steps=1), WITHIN, False),
        (replace(PLACE, round=5), WITHIN, False),
    ],
)
def test_a_state_is_kept_as_long_as_somebody_may_go_on_from_it(tmp_path, state, known, written, over):
    assert is_over(known, written, 5, 3) == over
    store = files(tmp_path)
    other = replace(known, worker=11)
    for place in (known, other):
        write(store, place, state)
    draft = tmp_path / f".{store.path(known).name}-0123.tmp"
    draft.write_bytes(b"torn")
    write(store, written, state, keep_round=5, keep_steps=3)
    assert set(store.of(1)) == {written} | ({known} - {known for _ in [0] if over})
    assert draft.exists() != over
    assert store.of(11) == [other]
    files(tmp_path, rank=1).forget_within()
    assert written in store.of(1)
    store.forget_within()
    assert not any(place.steps for place in store.of(1))


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
    store = WorkerStates(disk, rounds=1)
    rounds = [replace(PLACE, round=round_) for round_ in range(1, 21)]
    for place in rounds:
        store.save(place, [memoryview(state)])
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
    store = WorkerStates(files(tmp_path / "workers"), rounds=1)
    for place in (PLACE, replace(PLACE, round=8)):
        store.save(place, [memoryview(state)])
    assert not store.catch_up(0.1)
    assert os.strerror(20) in store.behind() or os.strerror(17) in store.behind()
    (tmp_path / "workers").unlink()
    assert store.catch_up(DEADLINE_S)
    assert store.settle(DEADLINE_S)
    assert store.read(replace(PLACE, round=8)) == state


def test_a_state_is_held_until_a_newer_one_is_on_storage(tmp_path, state):
    store = WorkerStates(files(tmp_path), rounds=1)
    rounds = [replace(PLACE, round=round_) for round_ in range(5, 10)]
    store.hold(rounds[1], state)
    store.let_go(rounds)
    assert store.read(rounds[1]) == state
    store.let_go(rounds[2:])
    assert store.read(rounds[1]) is None, "nobody knows that round any more"
    store.hold(rounds[1], state)
    store.save(rounds[2], [memoryview(state)])
    assert store.settle(DEADLINE_S)
    store.let_go(rounds)
    assert not store.holds(1, rounds[1].round)
