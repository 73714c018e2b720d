"""States of dataloaders as bytes: decoding restores the same states, and refuses other bytes without side effects."""

import contextlib
import os
import pickle
import random

import numpy as np
import pytest
import torch

from damage import damaged
from everstep.data.plain import StreamState, decode_states, encode_states, from_plain, to_plain


class Bomb:
    def __reduce__(self):
        return os.abort, ()


def test_a_pickle_is_never_executed():
    """Unpickling this object would end the process."""
    bomb = pickle.dumps(Bomb())
    with pytest.raises(ValueError, match="not stream states"):
        decode_states(bomb)
    (known,) = decode_states(encode_states({0: StreamState(1, to_plain(bomb))})).values()
    assert from_plain(known.state) == bomb


def test_damaged_states_are_refused_or_are_plain_values():
    state = {
        "_snapshot": {"_iterator_state": {"rng": torch.arange(40), "big": 1 << 70, "x": [1.5, None, ("a", b"bytes")]}},
        3: np.ones((2, 3), np.float32),
    }
    states = {7: StreamState(2**40, to_plain([])), 0: StreamState(5, to_plain(state))}
    data = encode_states(states)
    assert (decode_states(data), decode_states(b"")) == (states, {})
    for size in range(1, len(data)):
        with pytest.raises(ValueError, match="stream states"):
            decode_states(data[:size])
    assert from_plain(to_plain(-(1 << 3980))) == -(1 << 3980)
    with pytest.raises(ValueError, match="state is an integer of more than"):
        to_plain(1 << 5000)
    chance = random.Random(1)
    for _ in range(2000):
        with contextlib.suppress(ValueError):  # a refusal; any other exception fails the test
            for known in decode_states(damaged(data, chance)).values():
                from_plain(known.state)
