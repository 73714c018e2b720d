"""Attention as matrices, checked."""

import pytest
import torch
import torch.nn.functional as F

from everstep.attention import explicit
from everstep.attention.injection import Fault
from everstep.attention.masks import Visible, documents_of

L = 150
DOCUMENTS = documents_of(torch.tensor([0, 40, 150, 151, 300]), 2, L)
MASKS = {
    "causal": Visible(),
    "full": Visible(causal=False),
    "window": Visible(window=20),
    "documents": Visible(documents=DOCUMENTS),
    "rule": Visible(causal=False, mod=lambda b, h, i, j: (i >= j) & ((j % 3 == h % 3) | (i == j))),
}


def operands(dtype=torch.float32, groups=2, length=L, head=16):
    n = 4
    q = torch.randn(2, length, n, head).to(dtype)
    k, v = (torch.randn(2, length, n // groups, head).to(dtype) for _ in range(2))
    return *(x.requires_grad_() for x in (q, k, v)), torch.randn(2, length, n, head).to(dtype)


def computed(q, k, v, do, visible, guard=None):
    out, _ = explicit.attention(q, k, v, visible, guard=guard)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


def dense_mask(visible, heads):
    whole = Visible(visible.causal, visible.window, visible.documents, visible.mod)
    seen = whole.block(0, L, 0, L, batch=2, heads=heads, device=torch.device("cpu"))
    return torch.ones(1, 1, L, L, dtype=torch.bool) if seen is None else seen


def reference(q, k, v, do, visible):
    mask = dense_mask(visible, q.shape[2])
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_it_computes_attention_and_its_gradients(bench, mask, groups):
    args = operands(torch.float64, groups)
    got, refused, findings = bench.run(lambda guard: computed(*args, MASKS[mask], guard))
    for a, b in zip(got, reference(*args, MASKS[mask]), strict=True):
        torch.testing.assert_close(a, b)
    assert not refused
    assert not findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
def test_checks_change_no_bit(bench, dtype, mask):
    args = operands(dtype)
    got, _, findings = bench.run(lambda guard: computed(*args, MASKS[mask], guard))
    for a, b in zip(got, computed(*args, MASKS[mask]), strict=True):
        assert torch.equal(a, b)
    assert not findings


@pytest.mark.parametrize("section", explicit.RESULTS)
@pytest.mark.parametrize("kind", ["nan", "inf", "near-inf", "scale", "row", "tile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_element_row_or_tile_is_repaired_wherever_it_is(bench, section, kind, dtype):
    args = operands(dtype)
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
def test_a_lost_key_refuses_its_slot_at_any_rate_if_the_step_is_small(make_bench, section, small):
    bench = make_bench(frequency=0.0)
    bench.checks.looks_at_rows = small
    args = operands(torch.bfloat16)
    fault = Fault("inf", 256.5 / (2 * 2 * 256 * 128), sign=-1)  # of the third query, which sees three keys
    got, refused, findings = bench.run(lambda guard: computed(*args, Visible(), guard), section, fault)
    assert all(x.isfinite().all() for x in got)
    assert refused == small
    assert [f["section"] for f in findings] == [section] * small
    assert bench.run(lambda guard: computed(*args, Visible(), guard))[1:] == (False, [])
