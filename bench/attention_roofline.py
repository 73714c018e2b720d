"""Estimate what the attention check adds to a training step on an H100: kernels, bytes and time, not measured.

    python bench/attention_roofline.py --json

Builds one layer's attention from torchtitan's own config, as a user's trainer does, on tensors without values. It runs
the layer forward and backward in four ways: torchtitan's own; with the check at `frequency = 0` (only what is checked
in every slot); at `frequency = 1.0`; and by default, with every layer checked and timed. The difference is the cost of
the check: every operation on the device, the second run of the kernel, sums of weights (computed once a step; a step
has one slot here) and, by default, the timing events. It leaves out one kernel a slot, which gathers all layers'
verdicts. The cost of compiled comparisons is taken from Inductor's schedule for the same tensors on an H100, after its
fusions.

A kernel takes the longest of three times: its bytes at 80 % of 3.35 TB/s; its FLOPs at 65 % of 989 TFLOP/s (60 TFLOP/s
for fp32; attention 650 forward, 550 backward); and 1.5 us. An event takes 1.5 us. The transformer block is assumed to
be fast: its products, attention and forty passes over its activations, without launches. Host time is not counted.
"""

import argparse
import json
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import hints
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from everstep.titan import cpu

if not cpu.has_accelerator():
    cpu.stand_in()

from torchtitan.config import TrainingConfig
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common.attention import FlexAttention
from torchtitan.trainer import Trainer

from everstep.attention import compiled, fused, guard, linear, product
from everstep.attention.schedule import Schedule
from everstep.attention.section import AttentionCheck
from everstep.titan import attention as checked

BYTES_A_SECOND, FLOPS_A_SECOND, FP32_FLOPS_A_SECOND, LAUNCH_S = 0.8 * 3.35e12, 0.65 * 989e12, 60e12, 1.5e-6
FLASH_FORWARD, FLASH_BACKWARD = 650e12, 550e12
EXPONENTIALS_A_SECOND = 132 * 16 * 1.755e9
LENGTH = 8192
MODELS = {
    "Llama 3 8B": lambda: llama3.model_registry("8B", attn_backend="flex"),
    "Llama 3 70B": lambda: llama3.model_registry("70B", attn_backend="flex"),
    "Qwen3 32B": lambda: qwen3.model_registry("32B", attn_backend="flex"),
    "DeepSeek V3 16B": lambda: deepseek_v3.model_registry("16B", attn_backend="flex"),
}
FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.arange", "aten.scalar_tensor", "aten._unsafe_view")


def size(x: torch.Tensor) -> int:
    """Return the bytes of x in memory: a broadcast dimension counts once."""
    count = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        count *= length if stride else 1
    return count


def seconds(moved: float, flops: float, rate: float) -> float:
    """Return the time of one kernel."""
    return max(moved / BYTES_A_SECOND, flops / rate, LAUNCH_S)


class Cost(NamedTuple):
    """Kernels, bytes and seconds of a run."""

    kernels: int = 0
    bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, other: "Cost") -> "Cost":
        """Return the sum of both costs."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def less(self, other: "Cost") -> "Cost":
        """Return this cost minus the other."""
        return Cost(*(a - b for a, b in zip(self, other, strict=True)))


class Count(TorchDispatchMode):
    """Counts what runs under this mode: every operation that is not a view is a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost()

    def add(self, moved: float, flops: float = 0.0, rate: float = FLOPS_A_SECOND, exponentials: float = 0.0) -> None:
        """Count one kernel."""
        least = max(seconds(moved, flops, rate), exponentials / EXPONENTIALS_A_SECOND)
        self.cost = self.cost.plus(Cost(1, moved, least))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "everstep":  # count the operations that it consists of
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if func.is_view or name.startswith(FREE):
            return out
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if all(x.device.type == "cpu" for x in (*read, *written)):
            return out
        flops = 0.0
        if name.startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul", "aten.linear")):
            a = [x for x in read if x.dim() >= 2][-2]
            flops = 2.0 * a.numel() * written[0].shape[-1]
        narrow = not read or read[0].dtype == torch.bfloat16
        self.add(sum(map(size, read + written)), flops, FLOPS_A_SECOND if narrow else FP32_FLOPS_A_SECOND)
        return out


counting: list[Count] = []
"""The last one counts now."""


class Flash(torch.autograd.Function):
    """A stock causal kernel, counted: one forward kernel; in the backward one for delta, for dK with dV, and for dQ."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        b, length, n = q.shape[:3]
        out, lse = q.new_empty(b, length, n, v.shape[-1]), q.new_empty(b, length, n, dtype=torch.float32)
        scores = b * n * length**2 / 2
        counting[-1].add(sum(map(size, (q, k, v, out, lse))), flash_flops(q, v), FLASH_FORWARD, scores)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):  # pyrefly: ignore[bad-override] torch declares backward(ctx, *grads)
        q, k, v = ctx.saved_tensors
        gradients = tuple(map(torch.empty_like, (q, k, v)))
        counting[-1].add(2 * size(d_out))
        for part in (0.6, 0.4):
            moved = sum(map(size, (q, k, v, d_out, *gradients)))
            counting[-1].add(moved * part, 2.5 * part * flash_flops(q, v), FLASH_BACKWARD)
        return gradients


def flash_flops(q: torch.Tensor, v: torch.Tensor) -> float:
    """Return the FLOPs of a causal forward."""
    return q.shape[0] * q.shape[2] * q.shape[1] ** 2 / 2 * 2 * (q.shape[-1] + v.shape[-1])


def stock(self, q, k, v, *, out_transform=None, **kwargs):
    """Count attention in place of FlexAttention.forward."""
    out, lse = Flash.apply(q, k, v)
    return out if out_transform is None else out_transform(out, lse)


H100 = types.SimpleNamespace(
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
    name="NVIDIA H100",
)


@contextmanager
def on_an_h100() -> Iterator[None]:
    """Have Inductor plan for an H100, even if this machine has none."""
    properties = hints.DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    )  # fmt: skip
    create = classmethod(lambda cls, device: properties)
    with (
        mock.patch.object(hints.DeviceProperties, "create", create),
        mock.patch("torch.cuda.get_device_properties", return_value=H100),
        mock.patch.object(CudaInterface, "get_device_properties", staticmethod(lambda device=None: H100)),
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        mock.patch("torch.compiler.is_compiling", return_value=True),
        mock.patch.object(product, "signs", product.signs.__wrapped__),  # the compiler bypasses its cache too
    ):
        yield


def planned(function: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Cost, Any]:
    """Return the cost of `function` as Inductor schedules it for such arguments, and its result without values."""
    leaves, form = tree_flatten(given)
    fake = FakeTensorMode()

    def flat(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        args, known = tree_unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves], form)
        made.append(function(*args, **known))
        return tree_leaves(made[-1])

    with fake:
        like = [x for x in leaves if isinstance(x, torch.Tensor)]
        tensors = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in like]
    cost, made = Cost(), []
    with on_an_h100(), fake:
        graph = make_fx(flat, select_decomp_table())(*tensors)
        lowered = GraphLowering(graph, example_inputs=tensors)
        with V.set_graph_handler(lowered), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()):
            lowered.run(*tensors)
            lowered._update_scheduler()
            for node in lowered.scheduler.nodes:
                moved = node.get_read_write_buffers_sizes()
                if moved:
                    cost = cost.plus(Cost(1, moved, seconds(moved, node.estimate_flops() or 0, FLOPS_A_SECOND)))
    return cost, tree_map_only(torch.Tensor, without_values, made[-1])


def without_values(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor like x on the meta device."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


_plans: dict[Any, tuple[Cost, Any]] = {}


def as_compiled(function: Callable[..., Any], like: torch.Tensor, *, in_graph: bool = False):
    """Return a stand-in for `compiled.at_once`, which counts what the compiler makes of `function`."""

    def at_once(*args: Any, **known: Any) -> Any:
        described = [
            (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in tree_leaves((args, known))
        ]
        key = function, str(described)
        with _disable_current_modes():
            if key not in _plans:
                _plans[key] = planned(function, (args, known))
            cost, result = _plans[key]
            counting[-1].cost = counting[-1].cost.plus(cost)
            return result

    return at_once


class Holder(nn.Module):
    """One layer, under the name that it has in a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": layer})


def ran(name: str, section: AttentionCheck | None, *, in_graph: bool, tokens: int = guard.LARGE_STEP) -> Cost:
    """Return the cost of one slot of one layer's attention, forward and backward, in a step of `tokens` tokens.
    in_graph: whether it is called as in a compiled block."""
    spec = MODELS[name]()
    training = TrainingConfig(seq_len=LENGTH, local_batch_size=1, disable_cuda_graphs=True)
    config = Trainer.Config(model_spec=spec, training=training)
    spec.model.layers = spec.model.layers[1:2]
    spec.model.update_from_config(config=config)
    count = Count()
    counting[:] = [count]
    with mock.patch("torch.accelerator.is_available", return_value=True):
        if section is not None:
            checked.apply(config, section)
    with torch.device("meta"):
        holder = Holder(spec.model.layers[0].build()).to(torch.bfloat16)
    if section is not None:
        checked.make_checkable(holder)
    with mock.patch.object(cpu, "has_attention_kernels", return_value=True):
        checks = None if section is None else checked.attach([holder], section)
    x = torch.empty(1, LENGTH, spec.model.dim, device="meta", dtype=torch.bfloat16, requires_grad=True)
    positions = torch.empty(1, LENGTH, device="meta", dtype=torch.int64)
    with (
        mock.patch.object(FlexAttention, "forward", stock),
        mock.patch.object(compiled, "at_once", as_compiled),
        mock.patch.object(linear, "at_once", as_compiled),
        mock.patch.object(fused, "at_once", as_compiled),
        mock.patch.object(guard, "unseen_by_checkpointing", nullcontext),
        mock.patch.object(fused, "unseen_by_checkpointing", nullcontext),
        mock.patch.object(product, "unseen_by_checkpointing", nullcontext),
        mock.patch("torch.compiler.is_compiling", return_value=in_graph),
        count,
    ):
        if checks is not None:
            checks.looks_at_rows = tokens < guard.LARGE_STEP
            checks.begin(1, 0)
        attention: Any = holder.layers["1"].attention
        out = attention(x, None, positions)
        out.backward(torch.empty_like(out))
        if checks is not None:
            checks.look()
            for _ in checks._timed:
                count.add(0.0)
                count.add(0.0)
    return count.cost


def block_seconds(name: str) -> float:
    """Return the time of one transformer block, forward and backward, without checks."""
    model = MODELS[name]().model
    config = model.layers[1]
    with torch.device("meta"):
        layer = config.build()
    weights = 0.0
    for fqn, p in layer.named_parameters():
        routed = "routed_experts" in fqn
        share = config.moe.routed_experts.token_dispatcher.top_k / config.moe.num_experts if routed else 1.0
        weights += share * p.numel() * (p.dim() > 1)
    attention = config.attention
    key = getattr(attention, "qk_nope_head_dim", 0) + getattr(attention, "qk_rope_head_dim", 0)
    value = getattr(attention, "v_head_dim", None) or attention.head_dim or model.dim // attention.n_heads
    flops = LENGTH**2 / 2 * 2 * attention.n_heads * ((key or value) + value)
    elementwise = 40 * LENGTH * model.dim * 2 / BYTES_A_SECOND
    return 6 * LENGTH * weights / FLOPS_A_SECOND + flops / FLASH_FORWARD + 2.5 * flops / FLASH_BACKWARD + elementwise


def rate_of(block_s: float, looks_s: float, checks_s: float, layers: int) -> float:
    """Return the rate of sampled checks that the default schedule settles at, from seconds of a layer in a slot:
    without checks, for what is checked in every slot, and for the checks of a layer that is drawn."""
    section = AttentionCheck()
    schedule = Schedule(section.rate(), section.max_overhead)
    for layer in range(layers):
        schedule.add(layer)
    for slot in range(20):
        schedule.begin(1, slot)
        drawn = len(schedule.checked)
        looks, checks = layers * looks_s, drawn * checks_s
        schedule.slot_took(layers * block_s + looks + checks, checks, drawn, looks)
    return schedule.rate(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    parser.add_argument("--models", default=",".join(MODELS), help="models, separated by commas; default: all")
    parser.add_argument("--tokens", type=int, default=guard.LARGE_STEP, help="tokens of a step")
    args = parser.parse_args()
    result = {}
    columns = ("kernels", "GB", "of block", "kernels", "GB", "of block", "rate", "of block")
    print(f"{'length ' + str(LENGTH) + ', bf16':44s}{'every slot':^28s}{'rate 1':^28s}{'default':^18s}")
    print(f"{'':44s}" + "".join(f"{column:>10s}" if column != "GB" else f"{column:>8s}" for column in columns))
    for name in args.models.split(","):
        block = block_seconds(name)
        layers = len(MODELS[name]().model.layers)
        for in_graph in (False, True):
            known = {"in_graph": in_graph, "tokens": args.tokens}
            without = ran(name, None, in_graph=in_graph)
            always = ran(name, AttentionCheck(enable=True, frequency=0.0), **known).less(without)
            full = ran(name, AttentionCheck(enable=True, frequency=1.0), **known).less(without)
            timed = ran(name, AttentionCheck(enable=True), **known).less(without)
            rate = rate_of(block, always.seconds, timed.seconds - always.seconds, layers)
            default = always.seconds + rate * (timed.seconds - always.seconds)
            shares = [part / block for part in (always.seconds, full.seconds, default)]
            title = f"{name}, {'compiled' if in_graph else 'eager'}"
            print(
                f"{title:44s}{always.kernels:10d}{always.bytes / 1e9:8.2f}{shares[0]:10.2%}"
                f"{full.kernels:10d}{full.bytes / 1e9:8.2f}{shares[1]:10.2%}{rate:10.3f}{shares[2]:10.2%}"
            )
            result[title] = dict(zip(("every_slot", "rate_1", "default"), (round(x, 5) for x in shares), strict=True))
            result[title] |= {"kernels_every_slot": always.kernels, "kernels_rate_1": full.kernels, "rate": rate}
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
