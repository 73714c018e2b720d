"""Encode, verify, locate, correct."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.attention import checksums
from everstep.attention.checksums import BEYOND, CHECKSUM, CLEAN, CORRECTED, Direction, Sums

EXTREMES = [float("inf"), -float("inf"), float("nan"), 3e38, -3e38]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def encoded(a):
    """Checksums of the vectors along the last dimension of a."""
    wide = a.to(checksums.accumulator(a.dtype))
    return Sums(wide.sum(-1), wide @ checksums.weights(a.shape[-1], a))


def vectors(dtype=torch.float32, shape=(5, 32)):
    a = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    sums = encoded(a)
    bound = torch.full(shape[:-1], 1e-4, dtype=sums.plain.dtype)
    limit = torch.full(shape[:-1], 10.0, dtype=sums.plain.dtype)
    return a, sums, bound, limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_clean_vectors_stay_as_they_are(dtype):
    a, sums, bound, limit = vectors(dtype)
    fixed, status = checksums.correct(a, sums, bound, limit)
    assert torch.equal(fixed, a)
    assert (status == CLEAN).all()
    assert not checksums.verify(a, sums, bound).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("index", [0, 7, 31])
def test_one_extreme_element_is_located_and_rebuilt(dtype, value, index):
    a, sums, bound, limit = vectors(dtype)
    hit = a.clone()
    hit[2, index] = max(min(value, torch.finfo(dtype).max), -torch.finfo(dtype).max) if abs(value) < 1e39 else value
    fixed, status = checksums.correct(hit, sums, bound, limit)
    assert status.tolist() == [CLEAN, CLEAN, CORRECTED, CLEAN, CLEAN]
    torch.testing.assert_close(fixed, a, atol=1e-4, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 31), st.floats(1e-3, 9.0), st.sampled_from([-1, 1]))
def test_a_moderate_error_is_located_by_the_quotient_of_the_differences(index, size, sign):
    a, sums, bound, limit = vectors()
    hit = a.clone()
    hit[0, index] += sign * size
    fixed, status = checksums.correct(hit, sums, bound, limit)
    assert status[0] == CORRECTED
    assert (fixed - a).abs().max() <= 1e-4


def test_two_extremes_in_one_vector_are_left_to_the_other_direction():
    a, sums, bound, limit = vectors()
    hit = a.clone()
    hit[0, 3], hit[0, 9] = float("inf"), float("nan")
    fixed, status = checksums.correct(hit, sums, bound, limit)
    assert status[0] == BEYOND
    assert torch.equal(fixed.isnan(), hit.isnan())


@pytest.mark.parametrize("which", ["plain", "weighted"])
@pytest.mark.parametrize("value", [5.0, float("inf"), float("nan")])
def test_a_broken_checksum_is_not_taken_for_a_broken_element(which, value):
    a, sums, bound, limit = vectors()
    broken = getattr(sums, which).clone()
    broken[3] += value
    fixed, status = checksums.correct(a, sums._replace(**{which: broken}), bound, limit)
    assert status[3] == CHECKSUM
    assert torch.equal(fixed, a)


def matrix():
    y = torch.randn(2, 16, 64)
    width = 32
    tiles = y.unflatten(-1, (-1, width))
    rows = Direction(encoded(tiles), torch.full((2, 16, 2), 1e-4), torch.full((2, 16, 2), 10.0))
    columns = Direction(encoded(y.transpose(-1, -2)), torch.full((2, 64), 1e-4), torch.full((2, 64), 10.0))
    return y, rows, columns, width


@pytest.mark.parametrize(("where", "count"), [((1, 5), 64), ((0, slice(None), 40), 16)], ids=["row", "column"])
def test_what_one_direction_cannot_correct_the_other_does(where, count):
    y, rows, columns, width = matrix()
    hit = y.clone()
    hit[where] = float("nan")
    result = checksums.correct_both(hit, rows, columns, width)
    torch.testing.assert_close(result.matrix, y, atol=1e-4, rtol=0)
    assert (result.corrected, result.beyond) == (count, 0)


@pytest.mark.parametrize(("size", "doubtful"), [(3e4, False), (0.5, True)])
def test_several_rebuilt_elements_are_doubtful_unless_each_was_extreme(size, doubtful):
    y, rows, columns, width = matrix()
    hit = y.clone()
    hit[1, 5, :20] += size
    result = checksums.correct_both(hit, rows, columns, width)
    torch.testing.assert_close(result.matrix, y, atol=1e-4, rtol=0)
    assert result.beyond == 0
    assert result.doubtful == doubtful


def test_two_dimensional_damage_is_reported_as_not_correctable():
    y, rows, columns, width = matrix()
    hit = y.clone()
    hit[0, 4:6, 10:12] = float("nan")
    result = checksums.correct_both(hit, rows, columns, width)
    assert result.beyond > 0
