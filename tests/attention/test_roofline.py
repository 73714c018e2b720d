"""What the check adds on an H100, counted over the whole call."""

import pytest

from attention_roofline import block_seconds, ran, rate_of
from everstep.attention.section import AttentionCheck


@pytest.mark.slow
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "compiled"])
def test_what_a_call_of_llama_3_8b_adds(in_graph):
    name = "Llama 3 8B"
    block, without = block_seconds(name), ran(name, None, in_graph=in_graph)
    always, full = (
        ran(name, section, in_graph=in_graph).less(without)
        for section in (AttentionCheck(enable=True, frequency=0.0), AttentionCheck(enable=True, frequency=1.0))
    )
    assert 0.002 < always.seconds / block < 0.0033
    assert 0.03 < full.seconds / block <= 0.07
    sampled = full.seconds - always.seconds
    rate = rate_of(block, always.seconds, sampled, 32)
    assert (always.seconds + rate * sampled) / block == pytest.approx(AttentionCheck().max_overhead, rel=0.01)
