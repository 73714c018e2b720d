"""The workers' states in the run directory: what is read is what was written, for what it was written."""

from dataclasses import replace

import pytest

from everstep.semi.worker_files import HEAD_BYTES, Place, WorkerFiles

TOKEN, SIZE = b"t" * 32, 5000
PLACE = Place(worker=1, round=7, history=0xABC)


def files(folder, rank=0, whose="run 1, 2 ranks", token=TOKEN, nbytes=SIZE, most=SIZE):
    return WorkerFiles(folder, rank=rank, whose=whose, nbytes=nbytes, token=token, most=most)


def wrote(store, states, keep_from=0):
    store.save(states, keep_from=keep_from)
    store.settle()
    return store.failures()


def wrote_within(store, place, *parts, keep_from=0):
    assert store.idle
    store.save_within(place, [memoryview(part) for part in parts], keep_from=keep_from)
    store.settle()
    assert store.failures() == []


@pytest.fixture
def state():
    return bytes(range(250)) * (SIZE // 250)


def test_a_state_is_read_as_it_was_written(tmp_path, state):
    assert wrote(files(tmp_path), {PLACE: state}) == []
    other_group = files(tmp_path)
    assert other_group.has(PLACE)
    assert other_group.read(PLACE) == state


@pytest.mark.parametrize("change", [{"worker": 2}, {"round": 8}, {"history": 0xABD}])
def test_a_file_under_another_name_is_no_state(tmp_path, state, change):
    store, other = files(tmp_path), replace(PLACE, **change)
    wrote(store, {PLACE: state})
    assert not store.has(other)
    store.path(PLACE).rename(store.path(other))
    assert store.has(other)
    assert store.read(other) is None


@pytest.mark.parametrize("change", [{"rank": 1}, {"whose": "run 2, 2 ranks"}, {"token": b"u" * 32}])
def test_a_file_of_another_rank_run_or_layout_is_no_state(tmp_path, state, change):
    wrote(files(tmp_path), {PLACE: state})
    reader = files(tmp_path, **change)
    if reader.path(PLACE) != files(tmp_path).path(PLACE):
        files(tmp_path).path(PLACE).rename(reader.path(PLACE))
    assert reader.read(PLACE) is None


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b"x" + d[1:], lambda d: d[:-1] + b"x"]
)
def test_a_damaged_file_is_no_state(tmp_path, state, damage):
    store = files(tmp_path)
    wrote(store, {PLACE: state})
    path = store.path(PLACE)
    path.write_bytes(damage(path.read_bytes()))
    assert store.read(PLACE) is None


def test_states_of_rounds_that_nobody_needs_are_removed_and_no_others(tmp_path, state):
    store = files(tmp_path)
    for round_ in range(1, 6):
        wrote(store, {replace(PLACE, round=round_): state, replace(PLACE, worker=11, round=round_): state})
    torn = tmp_path / f".{store.path(replace(PLACE, round=2)).name}-0123.tmp"
    torn.write_bytes(b"")
    wrote(store, {replace(PLACE, round=6): state}, keep_from=4)
    left = {(place, r) for place in (1, 11) for r in range(1, 7) if store.has(replace(PLACE, worker=place, round=r))}
    assert left == {(1, 4), (1, 5), (1, 6), *((11, r) for r in range(1, 6))}
    assert not torn.exists()


WITHIN = replace(PLACE, steps=5, writer=0xE)


def test_a_state_within_a_round_is_read_for_its_steps_of_its_round_of_its_history(tmp_path, state):
    longer = state + b"where streams stand"
    wrote(files(tmp_path), {PLACE: state})
    wrote_within(files(tmp_path), WITHIN, state, b"where streams stand")
    store = files(tmp_path, most=len(longer))
    assert (store.read(PLACE), store.read(WITHIN), store.within(PLACE)) == (state, longer, [WITHIN])
    for change in ({"worker": 2}, {"round": 8}, {"history": 0xABD}, {"steps": 50}, {"steps": 0}, {"writer": 0xEE}):
        other = replace(WITHIN, **change)
        assert store.within(other) == ([WITHIN] if change.keys() & {"steps", "writer"} else [])
        store.path(WITHIN).rename(store.path(other))
        assert store.read(other) is None
        store.path(other).rename(store.path(WITHIN))
    assert files(tmp_path, rank=1).within(PLACE) == []
    assert files(tmp_path, most=len(longer) - 1).read(WITHIN) is None, "longer than any"
    for damaged in (longer[:-1], longer + b"x", b"x" + longer[1:]):
        path = store.path(WITHIN)
        path.write_bytes(path.read_bytes()[:HEAD_BYTES] + damaged)
        assert store.read(WITHIN) is None


def test_of_states_within_rounds_those_are_left_that_somebody_may_go_on_from(tmp_path, state):
    store = files(tmp_path)

    def left():
        return {path.name.partition(".rank-0.")[2] for path in tmp_path.iterdir() if path.name.startswith("worker-1.")}

    other = replace(WITHIN, worker=11, steps=2)
    for place in (other, replace(WITHIN, round=6), replace(WITHIN, history=1)):
        wrote_within(store, place, state)
    assert left() == {"round-7.steps-5.by-e.1"}
    for steps in (5, 10, 15):
        wrote_within(store, replace(WITHIN, steps=steps), state, keep_from=steps - 5)
    wrote_within(store, replace(WITHIN, round=6), state)  # by one that has missed a commit
    kept = {"round-7.steps-10.by-e.abc", "round-7.steps-15.by-e.abc", "round-7.steps-5.by-e.1"}
    assert left() == {"round-6.steps-5.by-e.abc", *kept}
    wrote(store, {replace(PLACE, round=6): state}, keep_from=4)
    assert left() == {"round-6.abc", *kept}
    (tmp_path / f".{store.path(WITHIN).name}-0123.tmp").write_bytes(b"torn")
    wrote(store, {PLACE: state}, keep_from=5)
    assert left() == {"round-6.abc", "round-7.abc"}
    assert not list(tmp_path.glob(".*"))
    assert store.within(other) == [other]
    wrote_within(store, WITHIN, state)
    files(tmp_path, rank=1).forget_within()
    assert store.within(other) == [other]
    store.forget_within()
    assert store.within(other) == []
    assert left() == {"round-6.abc", "round-7.abc"}


def test_a_state_that_cannot_be_written_is_told_of_and_stops_nothing(tmp_path, state):
    (tmp_path / "file").touch()
    store = files(tmp_path / "file" / "workers")
    assert len(wrote(store, {PLACE: state})) == 1
    assert store.read(PLACE) is None
    assert store.failures() == []
