"""Parity: every loss that the code promises to repair is repaired, byte for byte, by the real arithmetic."""

import itertools

import numpy as np
import pytest

from everstep.snapshot import parity


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_every_loss_within_the_promise_is_repaired(k, m):
    data, coded = ([parity.aligned_bytes(264) for _ in range(count)] for count in (k, m))
    random = np.random.default_rng(k)
    for shard in data:
        shard[:] = random.integers(0, 256, 264, dtype=np.uint8)
    parity.combine(parity.encoding_rows(k, m), data, coded)
    everything = data + coded
    for count in range(m + 1):
        for gone in itertools.combinations(range(k + m), count):
            have = [i for i in range(k + m) if i not in gone]
            lost = [i for i in gone if i < k]
            out = [np.zeros(264, dtype=np.uint8) for _ in lost]
            if lost:
                parity.combine(parity.decoding_rows(k, m, lost, have), [everything[i] for i in have[:k]], out)
            assert all(np.array_equal(out[j], data[i]) for j, i in enumerate(lost)), gone
