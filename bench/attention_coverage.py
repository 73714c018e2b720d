"""What the attention check finds, and what it does not, by section, kind and size of the error.

    python bench/attention_coverage.py --injections 20000 --vectors 1000000 --flips 8000 --json RESULT.json

Each injection computes one projection, or one attention, forward and backward, with one fault in one result,
and compares every output with those of the same computation without it:

    corrected, recomputed   repaired, and every output is within round-off of the clean one
    refused                 found and not repaired: the trainer computes the slot again
    unharmed                not found, and every output is within round-off of the clean one
    missed                  not found, and some output is not
    wrong                   called repaired, and some output is not

The size of an error is the change of the element it hits, in units of the root mean square of that result.
The second part computes clean data of every kind, badly scaled, constant and large included, and counts
alarms. The third flips single bits, each bit alike, with no check at all, and counts how many leave an output beyond
round-off: the vulnerability that the adaptive schedule reckons with (schedule.VULNERABILITY).
"""

import argparse
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from everstep.attention import explicit, findings, fused, guard, linear
from everstep.attention.injection import Fault, Injector
from everstep.attention.masks import Visible
from everstep.attention.section import AttentionCheck, Inject

EXTREME = ("inf", "nan", "near-inf", "-inf", "-near-inf")
SIZES = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4, math.inf)
LENGTHS = ((16, 30), (32, 25), (64, 20), (100, 8), (128, 8), (256, 5), (512, 2), (1024, 1), (2048, 1))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""What counts as round-off, in units of an output's largest value."""


class OneShot(Injector):
    """Hits one result once, and keeps how far the element moved."""

    def __init__(self) -> None:
        super().__init__(Inject(kind="scale"))
        self.target: str | None = None
        self.fault: Fault | None = None
        self.size = 0.0

    def begin(self, step: int) -> None:
        """Nothing is due by itself."""

    def strike(self, layer: int, section: str, part: int = 0, parts: int = 1) -> Fault | None:
        if section != self.target or self.fault is None or part != int(self.fault.place * 7919) % parts:
            return None
        fault, self.fault = self.fault, None
        return fault


class Measured(guard.Guard):
    """A guard that measures what it injects."""

    def touch(self, section, result, *, backward=False, part=0, parts=1):
        touched = super().touch(section, result, backward=backward, part=part, parts=parts)
        if touched is not result:
            moved = (touched.double() - result.double()).abs().max()
            rms = result.double().square().mean().sqrt()
            self.checks.injector.size = float(moved / rms) if moved == moved else math.inf
        return touched


@dataclass
class Case:
    """One computation: its outputs as a function of a guard, and the results that can be hit."""

    name: str
    results: tuple[str, ...]
    run: Callable[[guard.Guard], list[torch.Tensor]]


def data(shape: tuple[int, ...], dtype: torch.dtype, style: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor of one of the styles; "normal" unless false alarms are provoked."""
    x = torch.randn(shape, generator=generator)
    if style == "constant":
        x = torch.full(shape, 0.37)
    elif style == "offset":
        x = x + 5
    elif style == "large":
        x = x * (100 if dtype == torch.float16 else 1e6)
    elif style == "small":
        x = x * (1e-2 if dtype == torch.float16 else 1e-9)
    elif style == "badly scaled":
        rows = torch.logspace(1, -3, shape[1]).view(1, -1, *[1] * (len(shape) - 2))
        x = x * torch.logspace(-4, 2, shape[-1]) * rows
    elif style == "outliers":
        x = torch.where(torch.rand(shape, generator=generator) < 1e-3, x * 1e3, x)
    elif style == "two values":
        x = torch.where(x > 0.3, 1.3, -0.7)
    elif style == "sparse":
        x = torch.where(torch.rand(shape, generator=generator) < 0.95, torch.zeros(()), x)
    return x.to(dtype)


def linear_case(rows: int, inner: int, outer: int, bias: bool, dtype, style: str, seed: int) -> Case:
    """One projection."""
    g = torch.Generator().manual_seed(seed)
    x = data((1, rows, inner), dtype, style, g).requires_grad_()
    # Weights stay near their usual size, so that products of large inputs stay finite.
    of_weight = "normal" if style in ("large", "small") else style
    w = (data((1, outer, inner), torch.float32, of_weight, g)[0] * 0.05).to(dtype).requires_grad_()
    b = data((1, outer), dtype, "normal", g)[0].requires_grad_() if bias else None
    dy = data((1, rows, outer), dtype, style, g)
    sums = linear.WeightSums()

    def run(watcher):
        y = linear.linear(x, w, b, watcher, sums)
        return [y.detach(), *torch.autograd.grad(y, (x, w), dy)]

    return Case(f"linear {rows}x{inner}x{outer}", linear.result_names("wqkv"), run)


def sdpa(visible: Visible) -> fused.Attend:
    """torch's kernel on (B, L, N, H) under a mask."""
    plain = visible == Visible()

    def attend(q, k, v):
        batch, length, heads = q.shape[:3]
        mask = None if plain else visible.block(0, length, 0, length, batch=batch, heads=heads, device=q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=plain,
            enable_gqa=heads != k.shape[2],
        )
        return out.transpose(1, 2), None

    return attend


def attention_case(
    path: str, length: int, groups: int, mask: str, head: int, dtype: torch.dtype, style: str, seed: int
) -> Case:
    """One attention; batch 2 where it is short."""
    g = torch.Generator().manual_seed(seed)
    batch, n = (2 if length <= 256 else 1), (8 if length <= 256 else max(2, groups))
    # Scores of large inputs would be one-hot and their gradients zero: only v and dO take extreme styles
    # then.
    of_scores = "normal" if style in ("large", "small", "outliers") else style
    q = data((batch, length, n, head), dtype, of_scores, g)
    k = data((batch, length, n // groups, head), dtype, of_scores, g)
    v = data((batch, length, n // groups, head), dtype, style, g)
    do = data((batch, length, n, head), dtype, style, g)
    for x in (q, k, v):
        x.requires_grad_()
    documents = torch.arange(length).expand(batch, -1) // max(1, length // 3)
    visible = {
        "causal": Visible(),
        "document": Visible(documents=documents),
        "window": Visible(window=max(1, length // 4)),
        "block": Visible(causal=False, mod=lambda b, h, i, j: i // 16 == j // 16),
        "full": Visible(causal=False),
    }[mask]

    def run(watcher):
        if path == "explicit":
            out = explicit.attention(q, k, v, visible, guard=watcher)[0]
        else:
            out = fused.attention(sdpa(visible), q, k, v, scale=None, guard=watcher)[0]
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]

    if path == "explicit":
        results = explicit.RESULTS
    else:  # scores inside the kernel can be imitated under the causal mask alone
        results = (*fused.RESULTS, fused.SCORES) if mask == "causal" else fused.RESULTS
    return Case(f"{path} {length} {mask} G{groups}", results, run)


def draw_case(rng: random.Random, dtype, styles: tuple[str, ...]) -> Case:
    """A case by chance: short ones often, long ones sometimes."""
    style, seed = rng.choice(styles), rng.randrange(1 << 30)
    length = rng.choices([x for x, _ in LENGTHS], [w for _, w in LENGTHS])[0]
    kind = rng.choice(("linear", "explicit", "explicit", "fused"))
    if kind == "linear":
        inner, outer = rng.choice((64, 96, 256)), rng.choice((64, 192, 320))
        return linear_case(length, inner, outer, rng.random() < 0.5, dtype, style, seed)
    mask = rng.choice(("causal", "causal", "document", "window", "block", "full"))
    return attention_case(kind, length, rng.choice((1, 2, 4, 8)), mask, rng.choice((16, 32, 64)), dtype, style, seed)


def draw_fault(rng: random.Random) -> Fault:
    """A fault by chance: a third extreme, the rest flips and factors of every size."""
    kind = rng.choice(("inf", "nan", "near-inf", "bitflip", "bitflip", "scale", "scale", "row", "tile"))
    magnitude = rng.choice((-1, 1)) * 10 ** rng.uniform(-2, 4)
    return Fault(kind, rng.random(), rng.randrange(32), magnitude, rng.choice((-1, 1)))


def new_guard(frequency: float = 1.0, rerun: str = "always") -> Measured:
    checks = guard.Checks(AttentionCheck(enable=True, frequency=frequency, rerun=rerun))
    checks.injector = OneShot()
    return Measured(checks, 0, "wqkv")


def close(outputs: list[torch.Tensor], clean: list[torch.Tensor]) -> float:
    """The largest difference in units of each output's largest value; inf where a value is not finite."""
    worst = 0.0
    for got, want in zip(outputs, clean, strict=True):
        largest = want.double().abs().max().clamp_min(1e-300)
        moved = float((got.double() - want.double()).abs().max() / largest)
        worst = max(worst, moved if moved == moved else math.inf)
    return worst


def struck(case: Case, watcher: Measured, result: str, fault: Fault) -> tuple[list[torch.Tensor], bool, list[dict]]:
    """The outputs of a case with a fault in it, whether the slot is refused, and the findings."""
    injector = watcher.checks.injector
    injector.target, injector.fault, injector.size = result, fault, 0.0
    watcher.checks.begin(1, 0)
    outputs = case.run(watcher)
    if injector.fault is not None:
        raise AssertionError(f"nothing called {result} was computed in {case.name}")
    return outputs, watcher.checks.refused(), watcher.checks.drain()


def inject_all(count: int, seed: int, rerun: str) -> tuple[dict, float]:
    """Outcomes by (dtype, path, result, kind, size bin), and the worst difference of a repaired output."""
    rng = random.Random(seed)
    table: dict[tuple, Counter] = defaultdict(Counter)
    worst = 0.0
    done = 0
    while done < count:
        name = rng.choice(("fp32", "bf16"))
        dtype = DTYPES[name]
        case = draw_case(rng, dtype, ("normal",))
        watcher = new_guard(rerun=rerun)
        checks = watcher.checks
        checks.begin(1, 0)
        clean = case.run(watcher)
        if checks.refused() or checks.drain():
            raise AssertionError(f"an alarm on clean data: {case.name} {name}")
        long = clean[0].shape[1] > 300
        for _ in range(min(count - done, 4 if long else 40)):
            result = rng.choice(case.results)
            fault = draw_fault(rng)
            outputs, refused, found = struck(case, watcher, result, fault)
            moved = close(outputs, clean)
            near = moved <= TOLERANCE[dtype]
            if refused:
                outcome = "refused"
            elif found:
                actions = {finding["action"] for finding in found}
                outcome = ("recomputed" if "recomputed" in actions else "corrected") if near else "wrong"
                worst = max(worst, moved / TOLERANCE[dtype])
            else:
                outcome = "unharmed" if near else "missed"
            # A fault inside the fused kernel's forward goes into its storage: its size is not measured.
            inside = case.name.startswith("fused") and result in ("context", fused.SCORES)
            size = -1 if inside else next(i for i, top in enumerate(SIZES) if checks.injector.size <= top)
            # Below zero, an extreme score only hides its key.
            sign = "-" if fault.sign < 0 and fault.kind in ("inf", "near-inf") and "scores" in result else ""
            table[name, case.name.split()[0], result, sign + fault.kind, size][outcome] += 1
            done += 1
    return table, worst


def scheduled(path: str, result: str) -> str:
    """The section of the schedule that a result belongs to, without the projection's name."""
    if path == "linear":
        return result.rpartition(".")[2]
    return "attention.forward" if result in ("scores", "context") else "attention.backward"


def count_harm(flips: int, seed: int) -> dict[str, dict]:
    """Single bits flipped with no check, by section and dtype: how many, and how many leave some output beyond
    round-off; for `attention.rerun`, how many of them the identities of a fused forward miss."""
    rng = random.Random(seed)
    counts: dict[tuple[str, str], Counter] = defaultdict(Counter)
    done = 0
    while done < flips:
        name = rng.choice(("fp32", "bf16"))
        case = draw_case(rng, DTYPES[name], ("normal",))
        unchecked, identities = new_guard(0.0), new_guard(rerun="never")
        clean = case.run(unchecked)
        path = case.name.split()[0]
        for _ in range(min(flips - done, 4 if clean[0].shape[1] > 300 else 40)):
            result = rng.choice(case.results)
            fault = Fault("bitflip", rng.random(), rng.randrange(32))
            harm = close(struck(case, unchecked, result, fault)[0], clean) > TOLERANCE[DTYPES[name]]
            section = scheduled(path, result)
            counts[section, name].update(flips=1, harmful=int(harm))
            if path == "fused" and section == "attention.forward":
                outputs, refused, _ = struck(case, identities, result, fault) if harm else (clean, False, [])
                missed = not refused and close(outputs, clean) > TOLERANCE[DTYPES[name]]
                counts["attention.rerun", name].update(flips=1, harmful=int(missed))
            done += 1
    return {
        f"{section} {name}": {**seen, "share": round(seen["harmful"] / seen["flips"], 4)}
        for (section, name), seen in sorted(counts.items())
    }


def count_alarms(vectors: int, name: str, seed: int) -> dict:
    """Alarms on clean data, until `vectors` vectors were checked; and the largest share of a bound that any residual
    took, by path."""
    rng = random.Random(seed)
    seen = alarms = 0
    largest: dict[str, float] = defaultdict(float)
    by_style: Counter = Counter()
    original = findings.Deviation.bad

    def counting(self):
        nonlocal seen
        bad = original(self)
        seen += bad.numel()
        shares.append(float((self.residual.abs() / self.bound).nan_to_num(nan=0).max()) if bad.numel() else 0.0)
        return bad

    findings.Deviation.bad = counting
    try:
        while seen < vectors:
            style = STYLES[sum(by_style.values()) % len(STYLES)]
            by_style[style] += 1
            watcher = new_guard()
            watcher.checks.begin(1, 0)
            case = draw_case(rng, DTYPES[name], (style,))
            shares: list[float] = []
            outputs = case.run(watcher)
            if not all(bool(x.isfinite().all()) for x in outputs):
                continue  # the inputs overflow the dtype: not clean data
            path = case.name.split()[0]
            largest[path] = max(largest[path], *shares)
            watcher.checks.refused()
            for finding in watcher.checks.drain():
                alarms += 1
                print("ALARM", name, style, case.name, finding)
    finally:
        findings.Deviation.bad = original
    most = {path: round(share, 3) for path, share in sorted(largest.items())}
    return {"vectors": seen, "alarms": alarms, "cases": sum(by_style.values()), "largest share of a bound": most}


STYLES = (
    "normal",
    "constant",
    "offset",
    "large",
    "small",
    "badly scaled",
    "outliers",
    "two values",
    "sparse",
)
OUTCOMES = ("corrected", "recomputed", "refused", "unharmed", "missed", "wrong")


def show(table: dict, key: Callable[[tuple], tuple], title: str) -> list[dict]:
    """Print `table` summed over what `key` leaves out."""
    summed: dict[tuple, Counter] = defaultdict(Counter)
    for place, counts in table.items():
        if key(place):
            summed[key(place)] += counts
    print(f"\n{title}\n{'':44s}" + "".join(f"{x:>11s}" for x in OUTCOMES))
    rows = []
    for place in sorted(summed, key=str):
        counts = summed[place]
        print(f"{'  '.join(map(str, place)):44s}" + "".join(f"{counts[x]:11d}" for x in OUTCOMES))
        rows.append({"place": list(map(str, place)), **{x: counts[x] for x in OUTCOMES}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=20_000)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--flips", type=int, default=8_000)
    parser.add_argument("--rerun", default="always", choices=("always", "never"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begin = time.process_time()
    alarms = {name: count_alarms(args.vectors, name, args.seed) for name in DTYPES}
    for name, counts in alarms.items():
        print(f"clean data, {name}: {counts}", flush=True)
    harm = count_harm(args.flips, args.seed) if args.flips else {}
    for name, counts in harm.items():
        print(f"bits flipped unchecked, {name}: {counts}", flush=True)
    table, worst = inject_all(args.injections, args.seed, args.rerun)
    forward = ("wqkv.y", "scores", "context")

    def size(place):
        return "any size" if place[4] < 0 else f"<= {SIZES[place[4]]:g} rms"

    rows = {
        "by result": show(table, lambda p: (p[0], p[1], p[2]), "by result"),
        "extreme": show(
            table,
            lambda p: (p[0], p[1], "forward" if p[2] in forward else "backward", p[3]) if p[3] in EXTREME else (),
            "INF, NaN, near-INF",
        ),
        "by size": show(
            table,
            lambda p: (p[0], p[1], p[2], size(p)) if p[3] not in EXTREME else (),
            "flips, factors, rows and tiles, by size of the error",
        ),
    }
    took = time.process_time() - begin
    print(f"\nworst repaired output: {worst:.2g} of the tolerance; {took:.0f} s of CPU time")
    if args.json:
        args.json.write_text(json.dumps({"alarms": alarms, "harm": harm, "worst": worst, **rows}, indent=1))


if __name__ == "__main__":
    main()
