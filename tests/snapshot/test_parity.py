"""Parity: any loss the code promises to repair is repaired, byte for byte, with the arithmetic that is used."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.snapshot import parity


def slow_multiply(a: int, b: int) -> int:
    """Multiplication in GF(2^8) from its definition: shift, add, reduce."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a = (a << 1) ^ (parity.POLYNOMIAL if a & 0x80 else 0)
        b >>= 1
    return product


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


def test_parity_is_p_and_q_of_raid_6():
    data = some_shards(4, 1000)
    p, q = encode(data, 2)
    for at in (0, 1, 500, 999):
        column = [int(d[at]) for d in data]
        assert p[at] == column[0] ^ column[1] ^ column[2] ^ column[3]
        expected = 0
        for c, value in enumerate(column):
            power = 1
            for _ in range(c):
                power = slow_multiply(power, 2)
            expected ^= slow_multiply(power, value)
        assert q[at] == expected


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


codes = st.tuples(st.integers(2, 12), st.integers(1, 2))


@settings(max_examples=100, deadline=None)
@given(codes)
def test_the_rotation_places_every_shard_once_and_never_with_its_parity(drawn):
    n, m = drawn
    code = parity.Code(tuple(range(n)), min(m, n - 1))
    for giver in code.members:
        held = {code.stripe_coded_by(giver, row) for row in range(code.parity)}
        assert len(held) == code.parity
        assert sorted({*code.stripes_of(giver), *held}) == list(range(n))
        assert not held.intersection(code.stripes_of(giver))
        assert all(giver in code.columns(stripe) for stripe in code.stripes_of(giver))


@pytest.mark.parametrize(("groups", "size"), [(1, 8), (8, 8), (9, 8), (12, 8), (257, 8), (1000, 8), (40, 4)])
def test_parity_groups_are_of_about_the_size_and_keep_neighbours_apart(groups, size):
    members = tuple(range(0, 3 * groups, 3))
    found = parity.Domains(members, size, 1, (0,) * groups).groups
    assert sorted(group for each in found for group in each) == list(members)
    assert all(len(each) <= 1.5 * size + 1 for each in found)
    if groups > 2 * size:
        assert all(len(each) > size / 2 for each in found)
        assert all(b - a > 3 for each in found for a, b in itertools.pairwise(each))


@given(state_bytes=st.integers(0, 10**12), members=st.integers(1, 100))
def test_parts_cover_the_state_once_and_are_nearly_equal(state_bytes, members):
    bounds = [parity.part_bounds(state_bytes, members, i) for i in range(members)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == state_bytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert max(e - b for b, e in bounds) - min(e - b for b, e in bounds) <= 2 * parity.ALIGNMENT
