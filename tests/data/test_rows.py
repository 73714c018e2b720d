"""The rows of documents, their order, and that every way to read them gives the same rows."""

import random

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from data.conftest import built
from everstep.data.pack import pack
from everstep.data.permutation import permutation
from everstep.titan.data.rows import Rows


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_a_permutation_takes_every_index_to_one_of_its_own_and_each_epoch_to_another(size, seed, epoch):
    assert sorted(map(permutation(size, seed, epoch), range(size))) == list(range(size))
    orders = ((seed, epoch), (seed, epoch + 1), (~seed, 0))
    first = {tuple(map(permutation(size, *order), range(30))) for order in orders if size >= 30}
    assert len(first) in (0, 3)


@pytest.fixture
def token_file(tmp_path, jsonl):
    pack((jsonl,), tmp_path / "documents.tokens")
    return tmp_path / "documents.tokens"


@pytest.fixture
def build(token_file, tokenizer):
    def build(dp_rank=0, dp_world_size=1, seq_len=16, local_batch_size=2, **config):
        rows = Rows.Config(path=str(token_file), **config)
        return built(rows, tokenizer, dp_rank, dp_world_size, seq_len, local_batch_size)

    return build


def rows_of(batch):
    inputs, labels = batch
    assert set(inputs) == {"input", "positions"}
    return list(zip(*(part.tolist() for part in (inputs["input"], inputs["positions"], labels)), strict=True))


def test_unshuffled_rows_are_those_of_torchtitans_own_text_dataset(build, tokenizer, documents, register):
    register("documents", lambda path: Dataset.from_list([{"text": text} for text in documents]))
    theirs = list(HuggingFaceTextDataset("documents", None, tokenizer, seq_len=16))
    ours = build(shuffle=False, local_batch_size=1)
    batches = iter(ours)
    for inputs, labels in theirs:
        mine, mine_labels = next(batches)
        assert set(mine) == set(inputs)
        for key, value in inputs.items():
            assert mine[key].dtype == value.dtype
            assert torch.equal(mine[key][0], value)
        assert mine_labels.dtype == labels.dtype
        assert torch.equal(mine_labels[0], labels)
    assert len(theirs) == ours.rows


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("slots", "group_ranks", "ranks"), [(6, 1, 2), (6, 1, 6), (3, 2, 2), (4, 2, 8), (5, 1, 1)])
def test_plain_iteration_on_all_ranks_reads_in_a_step_what_its_slots_are(build, shuffle, slots, group_ranks, ranks):
    """A slot's rows do not depend on the rows that were read before."""
    groups = [build(rank, group_ranks, shuffle=shuffle) for rank in range(group_ranks)]
    for source in groups:
        source.open_slots(slots)
    stock = [iter(build(rank, ranks, shuffle=shuffle)) for rank in range(ranks)]
    accumulation, steps = slots * group_ranks // ranks, range(1, 12)
    expected = {
        step: [row for _ in range(accumulation) for loader in stock for row in rows_of(next(loader))] for step in steps
    }
    for step in random.Random(0).sample(steps, len(steps)):
        for source in groups:
            source.microbatch(10**9 - step, 0)
        of_slots = [row for slot in range(slots) for source in groups for row in rows_of(source.microbatch(step, slot))]
        assert of_slots == expected[step]


def test_a_checkpoint_of_other_data_or_another_batch_size_is_refused(build):
    source = build()
    source.open_slots(6)
    source.committed(4)
    state = source.state_dict()
    with pytest.raises(ValueError, match="other data than"):
        build(seq_len=8).load_state_dict(state)
    other = build()
    other.open_slots(8)
    plain = build()  # as under torchtitan's own trainer
    for _ in range(24):
        next(iter(plain))
    for saved in (state, plain.state_dict()):
        other.load_state_dict(saved)
        with pytest.raises(ValueError, match=r"of step 4 has read 48 rows, but .* read 64"):
            other.committed(4)
    source.load_state_dict(state)
    source.committed(4)
