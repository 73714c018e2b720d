"""Parity: every loss that the code promises to repair is repaired, byte for byte, by the real arithmetic."""

import itertools

import numpy as np
import pytest

from everstep.snapshot import parity


def some_shards(count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shards = [parity.aligned_bytes(length) for _ in range(count)]
    for shard in shards:
        shard[:] = random.integers(0, 256, length, dtype=np.uint8)
    return shards


def encode(data, m):
    out = [parity.aligned_bytes(len(data[0])) for _ in range(m)]
    parity.combine(parity.encoding_rows(len(data), len(out)), data, out)
    return out


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_every_loss_within_the_promise_is_repaired(k, m):
    data = some_shards(k, 264, seed=k)
    everything = data + encode(data, m)
    for count in range(m + 1):
        for gone in itertools.combinations(range(k + m), count):
            have = [i for i in range(k + m) if i not in gone]
            lost = [i for i in gone if i < k]
            out = [np.zeros(264, dtype=np.uint8) for _ in lost]
            if lost:
                parity.combine(parity.decoding_rows(k, m, lost, have), [everything[i] for i in have[:k]], out)
            assert all(np.array_equal(out[j], data[i]) for j, i in enumerate(lost)), gone
