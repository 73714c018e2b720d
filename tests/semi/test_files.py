"""The workers' states in the run directory: what is read is what was written, for what it was written."""

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


@pytest.mark.parametrize(
    ("place", "reader"),
    [
        *(({change: value}, {}) for change, value in {"worker": 2, "round": 8, "history": 0xABD}.items()),
        *(({}, {change: value}) for change, value in {"rank": 1, "whose": "run 2", "token": b"u" * 32}.items()),
    ],
)
def test_a_file_of_something_else_is_no_state_by_any_name(tmp_path, state, place, reader):
    store, reader, other = files(tmp_path), files(tmp_path, **reader), replace(PLACE, **place)
    store.write(PLACE, state)
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
        store.write(place, state)
    draft = tmp_path / f".{store.path(known).name}-0123.tmp"
    draft.write_bytes(b"torn")
    store.write(PLACE, state)
    assert store.on_storage(known) == draft.exists() == (not over)
    assert store.on_storage(PLACE)
    assert store.on_storage(other)
