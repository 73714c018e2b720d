"""Run by `test_kernels`: the kernels under Triton's interpreter, beside PyTorch's sums; one JSON line."""

import json
from collections import Counter

import torch
import triton.language as tl
from triton.runtime import interpreter

from attention_flash import flash
from everstep.attention import kernels, sums
from everstep.attention.identities import compared

moved: Counter[str] = Counter()
"""Bytes that kernels loaded and stored."""


class Builder(interpreter.InterpreterBuilder):
    """Counts what is moved; multiplies bf16, whose bits Triton 3.9's interpreter takes for whole numbers."""

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        wide = [
            self.cast_impl(x, tl.block_type(tl.float32, list(x.data.shape))) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        ]
        return super().create_dot(*wide, d, input_precision, max_num_imprecise_acc)

    def create_masked_load(self, ptrs, mask, other, cache_policy, is_volatile):
        moved["loaded"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return super().create_masked_load(ptrs, mask, other, cache_policy, is_volatile)

    def create_masked_store(self, ptrs, value, mask, cache_policy):
        moved["stored"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return super().create_masked_store(ptrs, value, mask, cache_policy)


interpreter.interpreter_builder.__class__ = Builder


def operands(dtype, *, batch=1, length=70, heads=4, kv_heads=2, dim=16, value_dim=16, sees=True, d_lse=False, hit=""):
    """What `identity_sums` takes: a causal attention and its gradients, heads before positions in memory."""
    draw = torch.Generator().manual_seed(length)
    q, k, v, do = (
        torch.randn(batch, n, length, width, generator=draw).to(dtype).transpose(1, 2)
        for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    )
    q[:, : length // 2] *= 0.01  # rows whose scores are all but equal
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = flash()(*inputs)
    gradients = [x.clone() for x in torch.autograd.grad(out, inputs, do)]
    out, of_lse = out.detach(), torch.randn(batch, heads, length, generator=draw).transpose(1, 2)
    if not sees:
        lse[:, length // 3] = -torch.inf
    if hit:
        gradients[("dq", "dk", "dv").index(hit)][0, length // 2, 0, 3] = torch.nan if hit == "dk" else torch.inf
    return q, k, v, out, do, *gradients, None if sees else lse, of_lse if d_lse else None, 0.3


def apart(a, b, size=None) -> float:
    """The largest difference of a and b by their largest size, b's own unless given."""
    close = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return (close.max() / ((b if size is None else size).abs().nan_to_num(0.0, 0.0).max() + 1e-30)).item()


def all_apart(own: sums.Sums, by_torch: sums.Sums, rows: int) -> dict[str, float]:
    """The same of every sum. Totals may be sums that cancel: their size is the root of so many squares."""
    found = {"spread": apart(own.spread, by_torch.spread)}
    for part, a, b in zip(own._fields[:4], own[:4], by_torch[:4], strict=True):
        size = {"from_lse": b[0]}
        if part != "outputs":
            size |= {"total": (rows * b.squares).sqrt(), "d_total": (rows * b.d_squares).sqrt()}
        found |= {f"{part}.{n}": apart(x, y, size.get(n)) for n, x, y in zip(a._fields, a, b, strict=True)}
    return found


def main() -> None:
    cases = {
        "fp32": operands(torch.float32, length=70),
        "bf16, one key head, wide values, blind rows": operands(
            torch.bfloat16, batch=2, length=131, kv_heads=1, value_dim=24, sees=False, d_lse=True
        ),
        "fp16, several shares": operands(torch.float16, length=517, heads=2, kv_heads=2, dim=20),
        "dq infinite": operands(torch.bfloat16, hit="dq"),
        "dk not a number": operands(torch.bfloat16, hit="dk"),
    }
    told = {}
    for name, given in cases.items():
        own, by_torch = kernels.identity_sums(*given), sums.identity_sums(*given)
        assert own._fields == by_torch._fields
        q, k, dtype = given[0], given[1], given[0].dtype
        shape = k.shape[1], q.shape[1] * (q.shape[2] // k.shape[2]), dtype, given[-1], torch.finfo(dtype).eps
        verdicts = [compared(x, *shape, plain_scores=True) for x in (own, by_torch)]
        told[name] = {
            "apart": {name: x for name, x in all_apart(own, by_torch, shape[1]).items() if x > 2e-6},
            "same verdict": torch.equal(verdicts[0].bad(), verdicts[1].bad()),
            "bad": bool(verdicts[1].bad().any()),
            "shares": kernels.column_totals(k).shape[1],
        }
    q, k, _, out, do, dq, dk, *_ = cases["fp16, several shares"]
    for name, call, operands_read in (
        ("column_totals", lambda: (kernels.column_totals(k),), (k,)),
        ("pair_sums", lambda: kernels.pair_sums(q, dq, None, 2), (q, dq)),
    ):
        moved.clear()
        made = call()
        told[name] = {**moved, "read": sum(x.nbytes for x in operands_read), "written": sum(x.nbytes for x in made)}
    k_sums, k_most = kernels.pair_sums(k, dk, kernels.column_totals(k), 2)
    small = k_sums[..., :20], k_most[..., 0], k_sums[..., :16]
    moved.clear()
    made = kernels.output_sums(q, out, do, None, None, *small, 0.3, k.shape[1], 1e-3, 0.0, 0.0)
    told["output_sums"] = {
        **moved,
        "read": sum(x.nbytes for x in (q, out, do)) + made[0].shape[1] * 4 * sum(x.numel() for x in small),
        "written": sum(x.nbytes for x in made),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
