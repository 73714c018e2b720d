"""Any group that computes a slot, at any time, reads the batches of an uninterrupted run from the slot's stream."""

import itertools
import logging
import pickle
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.hf_datasets.text_datasets import (
    HFDataSource,
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)

from data.conftest import built
from everstep.data.plain import StreamState, decode_states, encode_states, to_plain
from everstep.run.exits import TrainerEnds
from everstep.titan.data.streams import SlotStreams, _stateful


@pytest.fixture(autouse=True)
def quiet():
    """Silences torchtitan, which warns at every end of a small dataset."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def datasets(register, documents):
    rows = [{"text": text} for text in documents]
    register("map", lambda path: Dataset.from_list(rows))
    register("iterable", lambda path: Dataset.from_list(rows).to_iterable_dataset(num_shards=4))


def base(dataset="map", **kwargs):
    return HuggingFaceTextDataLoader.Config(dataset=dataset, **kwargs)


def streams(config, tokenizer, slots, dp_rank=0, dp_size=1, seed=0):
    source = built(SlotStreams.Config(base=config, seed=seed), tokenizer, dp_rank, dp_size)
    source.open_slots(slots)
    return source


def flat(batch):
    inputs, labels = batch
    return {key: value.tolist() for key, value in {**inputs, "labels": labels}.items()}


def uninterrupted(config, tokenizer, slots, steps):
    """Return for each slot the batches of torchtitan's own dataloader, and None after the end of its data."""
    loaders = [iter(built(config, tokenizer, slot, slots)) for slot in range(slots)]
    return [[flat(batch) if (batch := next(loader, None)) else None for _ in range(steps)] for loader in loaders]


SLOTS, STEPS = 3, 14


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large], max_examples=4)
@pytest.mark.parametrize("dataset", ["map", "iterable"])
@pytest.mark.parametrize("infinite", [True, False])
@given(data=st.data())
def test_groups_that_come_and_go_get_the_batches_of_an_uninterrupted_run(datasets, tokenizer, dataset, infinite, data):
    """Groups fail in the middle of steps, restart without states or with a peer's, and exchange states sometimes."""
    config = base(dataset, infinite=infinite)
    expected = uninterrupted(config, tokenizer, SLOTS, STEPS)
    groups = [streams(config, tokenizer, SLOTS) for _ in range(3)]

    def computes(group, step, slot):
        if expected[slot][step - 1] is None:
            with pytest.raises(DataloaderExhaustedError):
                groups[group].microbatch(step, slot)
        else:
            batch = groups[group].microbatch(step, slot)
            assert flat(batch) == expected[slot][step - 1]
            batch[0]["input"].zero_()  # a trainer may change the batch
            batch[0].clear()

    group_numbers = st.integers(0, 2)
    for step in range(1, STEPS + 1):
        for _ in range(data.draw(st.integers(0, 2), "failed attempts")):
            computes(data.draw(group_numbers), step, data.draw(st.integers(0, SLOTS - 1)))
        for slot in range(SLOTS):
            computes(data.draw(group_numbers), step, slot)
        for group in groups:
            group.committed(step)
        match data.draw(st.sampled_from(["", "", "exchange", "heal", "forget", "restart", "go back"]), "event"):
            case "exchange":
                told = [group.known_states() for group in groups]
                for group in groups:
                    for states in told:
                        group.learn(states)
            case "heal":
                victim, source = data.draw(st.permutations(range(3)))[:2]
                groups[victim] = streams(config, tokenizer, SLOTS)
                groups[victim].learn(groups[source].known_states())
                groups[victim].committed(step)
            case "forget":
                groups[data.draw(group_numbers)] = streams(config, tokenizer, SLOTS)
            case "go back":
                computes(data.draw(group_numbers), data.draw(st.integers(1, step)), 0)
            case "restart":
                state = pickle.loads(pickle.dumps(groups[data.draw(group_numbers)].state_dict()))
                groups = [streams(config, tokenizer, SLOTS) for _ in range(3)]
                for group in groups:
                    group.load_state_dict(state)


def test_whoever_adopts_a_stream_goes_on_from_its_newest_told_state_without_a_pickle(datasets, tokenizer, monkeypatch):
    """The state is of a committed step, never of one in progress. Opening draws no random numbers of the model."""
    owner, heir = (streams(base(), tokenizer, SLOTS) for _ in range(2))
    owner.began_after = heir.began_after = 50  # the run changed to this data after step 50
    expected = uninterrupted(base(), tokenizer, SLOTS, 11)[1]
    for step in range(1, 11):
        assert flat(owner.microbatch(50 + step, 1)) == expected[step - 1]
        if step == 9:  # step 9 is not committed yet
            heir.learn(owner.known_states())
        owner.committed(50 + step)
        if step == 8:
            owner.note_live()

    def reached(*args, **kwargs):
        raise AssertionError("a pickle was read")

    opened, open_stream = [], heir._open
    monkeypatch.setattr(heir, "_open", lambda *place: opened.append(place) or open_stream(*place))
    monkeypatch.setattr(pickle, "loads", reached)
    monkeypatch.setattr(pickle, "load", reached)
    before = torch.get_rng_state()
    assert flat(heir.microbatch(61, 1)) == expected[10]
    assert torch.equal(before, torch.get_rng_state())
    (stream, known, number), *others = opened
    assert (stream, known.position, number, others) == (1, 8, 10, [])
    assert b"\x80\x04" not in owner.known_states()
    heir.begin_after(70)
    assert flat(heir.microbatch(71 + 8, 1)) == expected[8], "read from the beginning"
    assert opened[1][1] is None


def test_a_checkpoint_is_gone_on_from_with_any_number_of_ranks_in_a_group(datasets, tokenizer):
    """Groups of one rank and of two. No batch is read again."""
    whole = streams(base(), tokenizer, 4)
    halves = [streams(base(), tokenizer, 2, rank, 2) for rank in range(2)]
    for source, slots in ((whole, 4), *((half, 2) for half in halves)):
        for step, slot in itertools.product((1, 2), range(slots)):
            source.microbatch(step, slot)
        source.committed(2)
    for writers, ranks in (([whole], 2), (halves, 1)):
        stored = {key: value for writer in writers for key, value in writer.state_dict().items()}
        for rank in range(ranks):
            reader = streams(base(), tokenizer, 4 // ranks, rank, ranks)
            reader.saved_ranks = range(len(writers))
            assert reader.state_dict().keys() == stored.keys()
            reader.load_state_dict(stored)
            positions = {stream: state.position for stream, state in decode_states(reader.known_states()).items()}
            assert positions == dict.fromkeys(range(rank, 4, ranks), 2)
    with pytest.raises(ValueError, match=r"on other data.*exclude_from_loading"):
        streams(base("iterable"), tokenizer, 4).load_state_dict(stored)
    streams(base("iterable"), tokenizer, 4).load_state_dict(stored | {"streams": 4})  # as older versions wrote


def test_a_batch_for_which_a_dataset_draws_random_numbers_is_the_same_on_every_group(register, tokenizer):
    drawn = lambda row: f"{row['text']} {random.random()} {np.random.rand()} {torch.rand(1).item()}"  # noqa: E731
    register("drawn", lambda path: Dataset.from_list([{"text": "x"}] * 20), drawn)
    owner, late, later = (streams(base("drawn"), tokenizer, 2) for _ in range(3))
    for step in range(1, 9):
        batch = flat(owner.microbatch(step, 1))
        owner.committed(step)
        if step == 5:
            later.learn(owner.known_states())
    before = random.getstate(), np.random.get_state()[2]
    assert flat(late.microbatch(8, 1)) == batch == flat(later.microbatch(8, 1))
    assert before == (random.getstate(), np.random.get_state()[2])


def test_streams_draw_alike_so_that_a_dataset_may_shuffle_what_it_then_divides_among_them(register, tokenizer):
    orders = []

    def load(path):
        orders.append(torch.randperm(20).tolist())
        return Dataset.from_list([{"text": str(number) * 40} for number in orders[-1]])

    register("shuffled_first", load)
    for seed in (0, 1):
        source = streams(base("shuffled_first"), tokenizer, 2, seed=seed)
        _ = source.microbatch(1, 0), source.microbatch(1, 1)
    assert orders[0] == orders[1] != orders[2] == orders[3], "each run has another order"


def test_a_group_tells_the_others_of_the_streams_that_it_reads_and_a_joiner_of_all(datasets, tokenizer):
    one, other = (streams(base(), tokenizer, 2) for _ in range(2))
    for slot, group in enumerate((one, other)):
        group.microbatch(1, slot)
        group.committed(1)
    other.learn(one.known_states(own=True))
    assert [[*decode_states(other.known_states(own=own))] for own in (True, False)] == [[1], [0, 1]]


def test_more_streams_than_documents_are_refused(datasets, tokenizer):
    with pytest.raises(TrainerEnds, match=r"61 data streams.*fewer documents"):
        streams(base(), tokenizer, 61).microbatch(1, 60)


def test_data_is_the_same_however_fast_it_is_read(datasets, tokenizer):
    """If they changed the fingerprint, a run that does not load its position would begin the data again."""
    usual, eager, finite = (
        streams(base(**settings), tokenizer, 1).fingerprint()
        for settings in ({}, {"pin_memory": True, "prefetch_factor": 4}, {"infinite": False})
    )
    assert usual == eager != finite


def shuffled(register):
    rows = [{"text": f"<{number}>" + "abcdefg"[: number % 7]} for number in range(80)]
    register("shuffled", lambda path: Dataset.from_list(rows).to_iterable_dataset(4).shuffle(seed=1, buffer_size=5))
    return base("shuffled")


def mixed_until_all_end(register):
    for name, count in (("short", 9), ("long", 17)):
        rows = [{"text": f"<{name} {number}>" + "abcdefg"[: number % 7]} for number in range(count)]
        register(name, lambda path, rows=rows: Dataset.from_list(rows).to_iterable_dataset(2))
    sources = [HFDataSource(dataset=name, weight=2 - at, infinite=False) for at, name in enumerate(("short", "long"))]
    return InterleavedHuggingFaceTextDataLoader.Config(sources=sources, stopping_strategy="all_exhausted")


@pytest.mark.parametrize("kind", [shuffled, mixed_until_all_end])
def test_where_a_state_leaves_something_out_streams_are_read_from_their_beginning(register, tokenizer, kind):
    """The states lack rows in a shuffle buffer, or the ended sources of a mixture: they would lead to other rows."""
    config = kind(register)
    expected = uninterrupted(config, tokenizer, 2, 30)[1]
    owner = streams(config, tokenizer, 2)
    for step, batch in enumerate(expected, 1):
        heir = streams(config, tokenizer, 2)
        heir.learn(owner.known_states())
        if step > 1:  # an older checkpoint may contain such a state
            loader = owner._live[1].loader
            state = to_plain(_stateful(loader).state_dict(loader))
            heir.learn(encode_states({1: StreamState(step - 1, state)}))
        heir.committed(step - 1)
        for group in (heir, owner):
            if batch is None:
                with pytest.raises(DataloaderExhaustedError):
                    group.microbatch(step, 1)
            else:
                assert flat(group.microbatch(step, 1)) == batch, f"step {step}"
        if batch is None:
            break
        owner.committed(step)
