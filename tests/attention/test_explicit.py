"""Tests of checked attention as matrices."""

import pytest
import torch

from attention_clean import sdpa
from everstep.attention import explicit
from everstep.attention.injection import Fault
from everstep.attention.masks import Visible, documents_of

from .conftest import Bench, attended, attention_operands

L = 150
MASKS = {
    "causal": Visible(),
    "full": Visible(causal=False),
    "window": Visible(window=20),
    "documents": Visible(documents=documents_of(torch.tensor([0, 40, 150, 151, 300]), 2, L)),
    "rule": Visible(causal=False, mod=lambda b, h, i, j: (i >= j) & ((j % 3 == h % 3) | (i == j))),
}


def computed(q, k, v, do, visible, guard=None):
    return attended(lambda *qkv: explicit.attention(*qkv, visible, guard=guard), q, k, v, do)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_it_computes_attention_and_its_gradients(bench, mask, groups):
    args = attention_operands(torch.float64, groups, L)
    got, refused, findings = bench.run(lambda guard: computed(*args, MASKS[mask], guard))
    for a, b in zip(got, attended(sdpa(MASKS[mask]), *args), strict=True):
        torch.testing.assert_close(a, b)
    assert not refused
    assert not findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_checks_change_no_bit(bench, dtype, mask):
    args = attention_operands(dtype, 2, L)
    bench.changes_nothing(lambda guard: computed(*args, MASKS[mask], guard))


@pytest.mark.parametrize("section", explicit.RESULTS)
@pytest.mark.parametrize("kind", ["nan", "inf", "near-inf", "scale", "row", "tile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_element_row_or_tile_is_repaired_wherever_it_is(bench, section, kind, dtype):
    args = attention_operands(dtype, 2, L)
    clean = computed(*args, Visible(causal=False))
    for place in (0.03, 0.5, 0.97):
        fault = Fault(kind, place, magnitude=-500.0)
        got, refused, findings = bench.run(lambda g: computed(*args, Visible(causal=False), g), section, fault)
        for a, b in zip(got, clean, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3 if dtype == torch.float32 else 2e-2, atol=1e-4)
        assert not refused
        assert findings[0]["section"] == section
        assert findings[0]["action"] in ("corrected", "recomputed")


@pytest.mark.parametrize("section", ["scores", "scores.backward"])
@pytest.mark.parametrize("small", [True, False])
def test_a_lost_key_refuses_its_slot_at_any_rate_if_the_step_is_small(section, small):
    bench = Bench(frequency=0.0)
    bench.checks.looks_at_rows = small
    args = attention_operands(torch.bfloat16, 2, L)
    fault = Fault("inf", 256.5 / (2 * 2 * 256 * 128), sign=-1)  # of the third query, which sees three keys
    got, refused, findings = bench.run(lambda guard: computed(*args, Visible(), guard), section, fault)
    assert all(x.isfinite().all() for x in got)
    assert refused == small
    assert [f["section"] for f in findings] == [section] * small
    assert bench.run(lambda guard: computed(*args, Visible(), guard))[1:] == (False, [])
