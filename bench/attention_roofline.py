"""What the checks would take on an H100, counted and not measured: kernels, bytes and FLOPs of every check, by running
the package's own code on meta tensors, and the time of a roofline.

    python bench/attention_roofline.py --json

Shapes of Llama 3 8B: dim 4096, 32 query and 8 key heads of 128, hidden 14336, length 8192, bf16, one sequence. A kernel
takes the longest of its bytes at 80 % of 3.35 TB/s, its FLOPs at 65 % of 989 TFLOP/s (bf16; fp32 at 60), and 3 µs.
`eager` runs every operation as a kernel of its own, as the checks do today. `fused` is what a compiler could make of
them, on paper: each run of elementwise operations and reductions between two matrix products reads its inputs and
writes its results once, one kernel for every shape of input; matrix products stay as they are. The last line with
--json holds rate1_of_block and kernels_per_layer of the fused form, the same of the eager one, and default_of_block,
which is the ceiling that adaptive rates keep to.
"""

import argparse
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import everstep.attention.product as product
from everstep.attention import fused, identities, linear
from everstep.attention.section import AttentionCheck

BYTES_A_SECOND, FLOPS_A_SECOND, FP32_FLOPS_A_SECOND, LAUNCH_S = 0.8 * 3.35e12, 0.65 * 989e12, 60e12, 3e-6
FLASH_FORWARD, FLASH_BACKWARD = 650e12, 550e12
LENGTH, DIM, HEADS, KV_HEADS, HEAD, HIDDEN = 8192, 4096, 32, 8, 128, 14336
FREE = ("aten.empty", "aten.detach", "aten.zeros_like", "aten.full", "aten.arange", "aten.scalar_tensor")


def size(x: torch.Tensor) -> int:
    """Bytes of x that are there: a broadcast dimension is read once."""
    count = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        count *= length if stride else 1
    return count


@dataclass
class Count(TorchDispatchMode):
    """Kernels, bytes, FLOPs and roofline seconds of what runs under it."""

    kernels: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    fused_kernels: int = 0
    fused_bytes: float = 0.0
    fused_seconds: float = 0.0
    _open: dict[int, torch.Tensor] = field(default_factory=dict)
    _made: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    """What this run of fusable operations made: its storage, and its bytes."""

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            for a in tree_leaves(args):  # a view of what is made in this run is made in it, too
                if isinstance(a, torch.Tensor) and self._base(a) in self._made:
                    for o in tree_leaves(out):
                        self._take(o)
            return out
        if name.startswith(FREE):
            return out
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        moved = sum(map(size, read)) + sum(map(size, written))
        if name.startswith(("aten.index.", "aten.index_select", "aten.index_copy", "aten.index_fill", "aten.gather")):
            moved = 3 * min(map(size, read + written))
        flops = self._product(name, read)
        rate = FLOPS_A_SECOND if read and read[0].dtype == torch.bfloat16 else FP32_FLOPS_A_SECOND
        took = max(moved / BYTES_A_SECOND, flops / rate, LAUNCH_S)
        self.kernels, self.bytes, self.flops = self.kernels + 1, self.bytes + moved, self.flops + flops
        self.seconds += took
        if flops or name.startswith("everstep."):
            self.close()
            self.fused_kernels, self.fused_bytes = self.fused_kernels + 1, self.fused_bytes + moved
            # What a compiler feeds into a product in its own precision does not become fp32 in memory first.
            self.fused_seconds += took
        else:
            for x in read:
                if self._base(x) not in self._made:
                    self._open[self._base(x)] = x
            for x in written:
                self._take(x)
        return out

    def _take(self, x: torch.Tensor) -> None:
        self._made.setdefault(self._base(x), (StorageWeakRef(x.untyped_storage()), size(x)))

    @staticmethod
    def _base(x: torch.Tensor) -> int:
        return x.untyped_storage()._cdata

    @staticmethod
    def _product(name: str, read: list[torch.Tensor]) -> float:
        if name.startswith("everstep."):  # a kernel of ours; two of them multiply
            a, matrices = read[:2][-1], name.startswith(("everstep.pair_sums", "everstep.output_sums"))
            return 2.0 * a.numel() * a.shape[-1] * matrices
        if "mm" not in name.split(".")[1]:
            return 0.0
        a, b = [x for x in read if x.dim() >= 2][-2:]
        return 2.0 * a.numel() * b.shape[-1]

    def close(self) -> None:
        """A run of fusable operations ends: it read what was there before it, and wrote what somebody still refers to.
        All else stays in registers."""
        if self._made:
            moved = sum(map(size, self._open.values()))
            moved += sum(count for kept, count in self._made.values() if not kept.expired())
            kernels = max(1, len({tuple(x.shape) for x in self._open.values() if x.numel() > 1 << 20}))
            self.fused_kernels, self.fused_bytes = self.fused_kernels + kernels, self.fused_bytes + moved
            self.fused_seconds += max(moved / BYTES_A_SECOND, kernels * LAUNCH_S)
        self._open.clear()
        self._made.clear()


def counted(call: Callable[[], object]) -> Count:
    """What `call` does."""
    count = Count()
    with count:
        call()
    count.close()
    return count


def on_meta(*shape: int) -> torch.Tensor:
    """A bf16 tensor without values."""
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16)


def checks() -> dict[str, Count]:
    """Every check of one layer at rate 1, forward and backward; the weights' sums, made once a step, by themselves."""
    # The Python form of it knows CUDA alone.
    product.narrow_product = torch.ops.aten.mm.dtype
    for module in (product, fused):
        setattr(module, "unseen_by_checkpointing", contextlib.nullcontext)  # noqa: B010
    found = {}
    for name, inner, outer in (
        ("wqkv", DIM, (HEADS + 2 * KV_HEADS) * HEAD),
        ("wo", HEADS * HEAD, DIM),
    ):
        x, dy, w = on_meta(LENGTH, inner), on_meta(LENGTH, outer), on_meta(outer, inner)
        for length in (LENGTH, inner, outer):
            product.signs(length, x.dtype, x.device)  # made once in a run
        rows, columns = product.tile_sums(w.t()), product.tile_sums(w)
        for part, call in (
            ("y", lambda x=x, dy=dy, rows=rows: product.row_deviation(dy, x, rows).bad()),
            ("dx", lambda x=x, dy=dy, columns=columns: product.row_deviation(x, dy, columns).bad()),
            ("dw", lambda x=x, dy=dy, w=w: product.row_deviation(w, dy.t(), product.tile_sums(x)).bad()),
            ("sums of weights, once a step", lambda w=w: linear.WeightSums().rows(w, 0)),
        ):
            found[f"{name}.{part}"] = counted(call)
    q, out, dq, d_out = (on_meta(1, LENGTH, HEADS, HEAD) for _ in range(4))
    k, v, dk, dv = (on_meta(1, LENGTH, KV_HEADS, HEAD) for _ in range(4))
    scale = HEAD**-0.5
    found["attention.forward"] = counted(lambda: identities.forward_deviation(out, v).bad())

    found["attention.backward"] = counted(
        lambda: identities.backward_deviation(q, k, v, out, d_out, dq, dk, dv, None, None, scale, wide_sums=True).bad()
    )
    return found


def block_seconds() -> float:
    """One transformer block, forward and backward, without checks."""
    weights = DIM * (HEADS + 2 * KV_HEADS) * HEAD + HEADS * HEAD * DIM + 3 * DIM * HIDDEN
    attention = 2 * 2 * LENGTH * LENGTH / 2 * HEADS * HEAD
    elementwise = 40 * LENGTH * DIM * 2 / BYTES_A_SECOND
    return (
        6 * LENGTH * weights / FLOPS_A_SECOND
        + attention / FLASH_FORWARD
        + 2.5 * attention / FLASH_BACKWARD
        + elementwise
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line as JSON")
    args = parser.parse_args()
    block = block_seconds()
    found = checks()
    forward = 2 * 2 * LENGTH * LENGTH / 2 * HEADS * HEAD / FLASH_FORWARD
    print(f"H100 by roofline, Llama 3 8B, length {LENGTH}, bf16, counted on meta tensors; block {1e3 * block:.2f} ms")
    print(f"{'':36s}{'eager: kernels':>16s}{'GB':>8s}{'ms':>8s}{'fused: kernels':>16s}{'GB':>8s}{'ms':>8s}")
    for name, count in found.items():
        eager = f"{count.kernels:16d}{count.bytes / 1e9:8.2f}{1e3 * count.seconds:8.3f}"
        compiled = f"{count.fused_kernels:16d}{count.fused_bytes / 1e9:8.2f}{1e3 * count.fused_seconds:8.3f}"
        print(f"{name:36s}{eager}{compiled}")
    each_slot = [count for name, count in found.items() if "once a step" not in name]
    eager, compiled = (sum(getattr(count, name) for count in each_slot) for name in ("seconds", "fused_seconds"))
    kernels = sum(count.fused_kernels for count in each_slot)
    most = AttentionCheck().max_overhead
    print(f"rate 1 without the second run: eager {eager / block:.1%} of a block, fused {compiled / block:.1%}")
    print(f"a second run of the forward in every call: {forward / block:.1%} more")
    result = {
        "rate1_of_block": round(compiled / block, 4),
        "rate1_eager_of_block": round(eager / block, 4),
        "second_run_of_block": round(forward / block, 4),
        "default_of_block": round(min(most, (compiled + forward) / block), 4),
        "kernels_per_layer": kernels,
        "eager_kernels_per_layer": sum(count.kernels for count in each_slot),
    }
    print(json.dumps(result) if args.json else result)


if __name__ == "__main__":
    main()
