"""What the attention check costs: a transformer block's forward + backward with it and without, in one run.

    python bench/attention_cost.py --dim 1024 --length 1024 --json RESULT.json
    python bench/attention_cost.py --dim 4096 --hidden 14336 --kv-heads 8 --head 128 --length 8192 \\
        --dtype bf16 --paths fused

The second is the 8B shape, for a GPU. All variants take turns, round after round. On a CPU their processor
time is measured, which other processes disturb less than the clock; on a GPU the time of CUDA events. The
numbers are medians over the rounds, and the ratio is made of the rounds' own ratios to the unchecked variant: the
median of those at each place in a cycle of eight steps, of which adaptive checks look at one, and the mean of these.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from attention_coverage import sdpa
from everstep.attention import explicit, fused, linear, operators
from everstep.attention.guard import Checks
from everstep.attention.masks import Visible
from everstep.attention.schedule import GATHERED
from everstep.attention.section import AttentionCheck

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CAUSAL = sdpa(Visible())
VARIANTS: dict[str, dict | None] = {
    "unchecked": None,
    "rate 0": {"frequency": 0.0},
    "adaptive": {"frequency": "adaptive"},
    "rate 1": {"frequency": 1.0},
    "rate 1, no second run": {"frequency": 1.0, "rerun": "never"},
}


class Block:
    """Pre-norm transformer block: attention with grouped heads, then a gated feed-forward network."""

    def __init__(self, args: argparse.Namespace, device: torch.device, path: str, section: dict | None) -> None:
        torch.manual_seed(0)
        dtype, dim, head = DTYPES[args.dtype], args.dim, args.head
        self.heads, self.kv_heads, self.head = dim // head, args.kv_heads or dim // head, head

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, device=device) * columns**-0.5).to(dtype).requires_grad_()

        self.w_qkv = weight((self.heads + 2 * self.kv_heads) * head, dim)
        self.w_o = weight(dim, self.heads * head)
        self.w1, self.w3, self.w2 = (
            weight(args.hidden, dim),
            weight(args.hidden, dim),
            weight(dim, args.hidden),
        )
        self.norm = torch.ones(dim, device=device, dtype=dtype)
        self.path = path
        self.checks = None
        if section is not None:
            self.checks = Checks(AttentionCheck(enable=True, **section))
            self.guards = {
                "wqkv": self.checks.guard(0, "wqkv", linear.result_names("wqkv")),
                "wo": self.checks.guard(0, "wo", linear.result_names("wo")),
                "attention": self.checks.guard(0, "inner_attention", ()),
            }
            self.sums = {"wqkv": linear.WeightSums(), "wo": linear.WeightSums()}

    def project(self, name: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if self.checks is None:
            return F.linear(x, w)
        if torch.compiler.is_compiling():
            return operators.linear(x, w, None, self.guards[name])
        return linear.linear(x, w, None, self.guards[name], self.sums[name])

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        guard = None if self.checks is None else self.guards["attention"]
        if self.path == "explicit":
            return explicit.attention(q, k, v, Visible(), guard=guard)[0]
        if guard is None:
            return CAUSAL(q, k, v)[0]
        attend = operators.attention if torch.compiler.is_compiling() else fused.attention
        return attend(CAUSAL, q, k, v, scale=None, guard=guard)[0]

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """A module of torchtitan's kind: projections and what is between them."""
        qkv = self.project("wqkv", x, self.w_qkv).unflatten(-1, (-1, self.head))
        q, k, v = (t.contiguous() for t in qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2))
        return self.project("wo", self.attend(q, k, v).flatten(2), self.w_o)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(F.rms_norm(x, (x.shape[-1],), self.norm))
        h = F.rms_norm(x, (x.shape[-1],), self.norm)
        return x + F.linear(F.silu(F.linear(h, self.w1)) * F.linear(h, self.w3), self.w2)

    def parameters(self) -> list[torch.Tensor]:
        return [self.w_qkv, self.w_o, self.w1, self.w2, self.w3]


def timer(device: torch.device) -> Callable[[Callable[[], None]], float]:
    """Seconds that a call takes on this device."""
    if device.type == "cpu":

        def on_cpu(call):
            begin = time.process_time()
            call()
            return time.process_time() - begin

        return on_cpu

    def on_gpu(call):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    return on_gpu


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory that tensors made in `call` hold at once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    assert events, "the profiler saw no memory"
    return most


def whole_cycles(rounds: int) -> int:
    """Rounds, and as many more as the last cycle of adaptive checks takes."""
    return -(-rounds // GATHERED) * GATHERED


def over_cycle(ratios: list[float]) -> float:
    """Mean over the places in a cycle of steps, of the median at each. ratios: of `whole_cycles`."""
    return statistics.mean(statistics.median(ratios[place::GATHERED]) for place in range(GATHERED))


def compare(calls: dict[str, Callable[[int], None]], rounds: int, device: torch.device) -> dict[str, dict]:
    """Median seconds of each call, ratio to the first, and peak memory; two rounds to warm up, then whole cycles."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    measure = timer(device)
    for index in range(whole_cycles(rounds) + 2):
        for name, call in calls.items():
            took = measure(lambda call=call, step=index + 1: call(step))
            if index >= 2:
                seconds[name].append(took)
    base = next(iter(seconds.values()))
    return {
        name: {
            "seconds": statistics.median(values),
            "ratio": over_cycle([a / b for a, b in zip(values, base, strict=True)]),
            "peak_mb": peak_bytes(lambda name=name: calls[name](rounds + 3), device) / 1e6,
        }
        for name, values in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=2816)
    parser.add_argument("--head", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=0, help="0: as many as query heads")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--paths", default="explicit,fused")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--slots", type=int, default=1, help="of a step, in which sums of weights are made once")
    parser.add_argument("--compile", action="store_true", help="every variant is compiled, the fused path alone")
    parser.add_argument("--parts", default="block,attention module,between projections")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    x = torch.randn(args.batch, args.length, args.dim, device=device).to(DTYPES[args.dtype])
    results = {}
    for path in args.paths.split(","):
        blocks = {variant: Block(args, device, path, section) for variant, section in VARIANTS.items()}
        if path == "explicit" or args.compile:  # neither makes a second run
            blocks.pop("rate 1, no second run")
        for block in blocks.values() if args.compile else ():
            for part in ("forward", "attention", "attend"):
                setattr(block, part, torch.compile(getattr(block, part), fullgraph=True))

        def slot(block: Block, step: int, forward: Callable[[torch.Tensor], torch.Tensor], weights: list) -> None:
            for number in range(args.slots):
                if block.checks is not None:
                    block.checks.begin(step, number)
                inputs = x.detach().requires_grad_()
                torch.autograd.grad(forward(inputs), [inputs, *weights], x)
                if block.checks is not None and (block.checks.refused() or block.checks.drain()):
                    raise AssertionError("an alarm on clean data")
            if block.checks is not None:
                block.checks.committed()

        def whole(block: Block, step: int) -> None:
            slot(block, step, block.forward, block.parameters())

        def module(block: Block, step: int) -> None:
            slot(block, step, block.attention, [block.w_qkv, block.w_o])

        heads = x.shape[-1] // args.head
        q, k, v = (
            torch.randn(args.batch, args.length, n, args.head, device=device).to(x.dtype).requires_grad_()
            for n in (heads, args.kv_heads or heads, args.kv_heads or heads)
        )

        def alone(block: Block, step: int, q=q, k=k, v=v) -> None:
            if block.checks is not None:
                block.checks.begin(step, 0)
            out = block.attend(q, k, v)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            if block.checks is not None:
                block.checks.refused()

        runs = {"block": whole, "attention module": module, "between projections": alone}
        for part, run in ((part, runs[part]) for part in args.parts.split(",")):
            measured = compare(
                {variant: lambda step, b=block, run=run: run(b, step) for variant, block in blocks.items()},
                args.rounds,
                device,
            )
            results[f"{path}, {part}"] = measured
            for variant, numbers in measured.items():
                took = f"{numbers['seconds'] * 1e3:9.2f} ms  ratio {numbers['ratio']:.3f}"
                took += f"  peak {numbers['peak_mb']:.0f} MB"
                print(f"{name} {args.dtype}  {path:8s}  {part:19s}  {variant:21s}  {took}", flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"device": name, "args": {k: str(v) for k, v in vars(args).items()}, **results})
        )


if __name__ == "__main__":
    main()
