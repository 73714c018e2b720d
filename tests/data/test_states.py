"""States of dataloaders as bytes: they come back as they were, and bytes that are no state do nothing."""

import contextlib
import os
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from damage import damaged
from everstep.data.plain import StreamState, decode_states, encode_states, plain, restored
from everstep.run import typed

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
ARRAYS = st.sampled_from(["?", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8"]).flatmap(
    lambda name: st.lists(st.integers(0, 1), max_size=4).map(lambda values: np.array(values, np.dtype(name)))
)
VALUES = st.recursive(
    SCALARS | ARRAYS | ARRAYS.filter(lambda a: a.dtype not in (np.uint16, np.uint64)).map(torch.from_numpy),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor | np.ndarray):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert bytes(memoryview(np.asarray(one)).cast("B") if one.size else b"") == bytes(
            memoryview(np.asarray(other)).cast("B") if other.size else b""
        )
    else:
        assert one == other or one != one  # NaN


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_a_plain_value_comes_back_as_it_was(value):
    assert_same(restored(typed.loads(typed.dumps(plain(value)))), value)


class Bomb:
    def __reduce__(self):
        return os.abort, ()


def test_a_pickle_is_never_executed():
    """It ends the process if it is."""
    bomb = pickle.dumps(Bomb())
    with pytest.raises(ValueError, match="no stream states"):
        decode_states(bomb)
    (known,) = decode_states(encode_states({0: StreamState(1, plain(bomb))})).values()
    assert restored(known.state) == bomb


def fuzz(rounds, seed):
    state = {
        "_snapshot": {"_iterator_state": {"rng": torch.arange(40), "big": 1 << 70, "x": [1.5, None, ("a", b"bytes")]}},
        3: np.ones((2, 3), np.float32),
    }
    states = {7: StreamState(2**40, plain([])), 0: StreamState(5, plain(state))}
    data = encode_states(states)
    assert decode_states(data) == states
    assert decode_states(b"") == {}
    for size in range(1, len(data)):
        with pytest.raises(ValueError, match="stream states"):
            decode_states(data[:size])
    chance = random.Random(seed)
    for _ in range(rounds):
        with contextlib.suppress(ValueError):  # a sentence; anything else fails here
            for known in decode_states(damaged(data, chance)).values():
                restored(known.state)


def test_damaged_states_are_refused_or_are_plain_values():
    fuzz(2000, 1)
