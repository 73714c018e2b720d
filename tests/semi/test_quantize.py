"""Numbers in fewer bits: how far they are off, and that nothing else happens to them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.semi.quantize import BLOCK, decode, encode

SIZES = st.integers(1, 3 * BLOCK + 5)


@given(SIZES, st.integers(0, 1000), st.sampled_from([1e-30, 1e-6, 1.0, 1e30]))
def test_values_are_off_by_half_a_step_at_most(size, seed, magnitude):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * magnitude
    assert torch.equal(decode(encode(values, "none"), "none"), values)
    assert ((decode(encode(values, "bf16"), "bf16") - values).abs() <= values.abs() * 2**-8).all()
    found = decode(encode(values, "int8"), "int8")
    assert found.shape == values.shape
    for off, block in zip((found - values).abs().split(BLOCK), values.split(BLOCK), strict=True):
        assert off.max() <= 0.501 * block.abs().max() / 127


@pytest.mark.parametrize(("to", "each"), [("none", 4), ("bf16", 2), ("int8", 1)])
def test_that_many_bytes_travel(to, each):
    blocks = 4 if to == "int8" else 0
    assert len(encode(torch.ones(3 * BLOCK + 1), to)) == each * (3 * BLOCK + 1) + 4 * blocks


@pytest.mark.parametrize("to", ["none", "bf16", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_become_a_number(to, bad):
    values = torch.ones(10)
    values[3] = bad
    assert not decode(encode(values, to), to).isfinite().all()


def test_nothing_stays_nothing():
    assert torch.equal(decode(encode(torch.zeros(BLOCK + 1), "int8"), "int8"), torch.zeros(BLOCK + 1))
