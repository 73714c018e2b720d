"""How probable it is that a run can always be restored from memory, by simulation and in closed form.

    python bench/survival.py [--runs 2000] [--days 30] [--json] [--svg docs/snapshot-survival.svg]

The model. n hosts hold one keeper each and fail with their memory, independently, at a constant rate. A
host's part is held again, on the hosts that are left or on a new one, once the next snapshot is published and
coded: the *window* is the interval between snapshots plus the time to copy and code one. If more hosts of one
parity group (of about eight) fail within one window than parity covers, the step of that window is lost, and if
all trainers die at that moment, only disk is left. (As long as one trainer lives, its own copy of the state does
too; the simulation asks for the harder thing.)

- Simulation: failure times are drawn for every host; in each window that has any, `everstep.snapshot.sources`
  decides from the headers of the keepers that are left. Nothing of the code's properties is assumed.
- Closed form: with p = 1 - exp(-window / MTBF), a parity group of n survives a window with
  P(Binomial(n, p) <= parity), a run if all do in all windows.

This is the argument of REFT (arXiv 2310.12670), section on reliability, for rotated parity of one or two
shards.
"""

import argparse
import functools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from everstep.snapshot.header import Header
from everstep.snapshot.parity import Domains
from everstep.snapshot.peers import Held
from everstep.snapshot.sources import decide

DAY_S = 86_400.0
SCHEMES = {"no parity": 0, "parity 1": 1, "parity 2": 2}


@dataclass(frozen=True)
class Case:
    """One run under failures. Times in seconds."""

    hosts: int
    parity: int
    mtbf_s: float
    """Mean time between failures of one host."""
    interval_s: float
    """Between snapshots: steps times the time of a step."""
    coding_s: float
    """To copy a snapshot and code its parity."""
    length_s: float
    parity_group: int = 8

    @property
    def window_s(self) -> float:
        return self.interval_s + self.coding_s

    @property
    def windows(self) -> int:
        return max(1, round(self.length_s / self.window_s))


def group_sizes(hosts: int, size: int) -> list[int]:
    """How large the parity groups of a run are."""
    return [len(each) for each in Domains(tuple(range(hosts)), size, 1, (0,) * hosts).groups]


def closed_form(case: Case) -> float:
    """Probability that every window of the run is survived."""
    p = -math.expm1(-case.window_s / case.mtbf_s)
    kept = 1.0
    for n in group_sizes(case.hosts, case.parity_group):
        m = min(case.parity, n - 1)
        lost = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(m + 1, n + 1))
        kept *= 1 - lost
    return math.exp(case.windows * math.log(kept)) if kept > 0 else 0.0


@functools.lru_cache(maxsize=100_000)
def restorable(hosts: int, parity: int, size: int, lost: frozenset[int]) -> bool:
    """Whether the decision finds the step when these hosts are gone."""
    held = []
    domains = Domains(tuple(range(hosts)), size, parity, (0,) * hosts)
    for group in range(hosts):
        mine = domains.group_of(group)
        rows = domains.rows(mine)
        for kind in ("data", "parity") if rows else ("data",):
            header = Header(
                run="r", kind=kind, group=group, rank=0, ranks=1, step=1, history=1, members=tuple(range(hosts)),
                parity=rows, parity_group=mine, topology="t", state_bytes=hosts, sections={}, sequence=1, taken_at=0.0,
                part=(group, group + 1) if kind == "data" else (0, 0),
                roots=("",) * len(mine) if kind == "parity" else (),
            )  # fmt: skip
            if group not in lost:
                held.append(Held(str(group), header, True))
    return decide(held, run="r").from_memory


def survives(case: Case, random: np.random.Generator) -> bool:
    """One simulated run: failure times host by host, then the windows in which any fall."""
    failures: dict[int, set[int]] = {}
    for host in range(case.hosts):
        at = random.exponential(case.mtbf_s)
        while at < case.windows * case.window_s:
            failures.setdefault(int(at / case.window_s), set()).add(host)
            at += random.exponential(case.mtbf_s)
    return all(restorable(case.hosts, case.parity, case.parity_group, frozenset(lost)) for lost in failures.values())


def simulate(case: Case, runs: int, seed: int) -> tuple[float, float]:
    """Fraction of runs that survive, and its standard error."""
    random = np.random.default_rng(seed)
    survived = sum(survives(case, random) for _ in range(runs))
    # Laplace's estimate, so that 0 or all of them still has an error to compare with.
    share = (survived + 1) / (runs + 2)
    return survived / runs, math.sqrt(share * (1 - share) / runs)


def svg(curves: dict[str, list[tuple[float, float]]], title: str) -> str:
    """Probability of survival against MTBF (logarithmic), one line per curve."""
    width, height, left, top, right, bottom = 720, 400, 70, 40, 20, 60
    xs = [x for points in curves.values() for x, _ in points]
    low, high = math.log10(min(xs)), math.log10(max(xs))

    def place(x: float, y: float) -> str:
        across = (math.log10(x) - low) / (high - low) * (width - left - right)
        return f"{left + across:.1f},{top + (1 - y) * (height - top - bottom):.1f}"

    colours = ["#b3261e", "#1f6fb2", "#2e7d32", "#6a1b9a", "#ef6c00", "#00838f"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{title}</text>',
    ]
    for tick in range(6):
        y = float(place(min(xs), tick / 5).split(",")[1])
        parts.append(f'<path d="M{left},{y} H{width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tick / 5:.1f}</text>')
    for exponent in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1):
        x = place(10**exponent, 0).split(",")[0]
        parts.append(f'<path d="M{x},{top} V{height - bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{10**exponent:g}</text>')
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 16}" text-anchor="middle">'
        "mean time between failures of one host (days)</text>"
    )
    for (name, points), colour in zip(curves.items(), colours, strict=False):
        line = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = next((p for p in points if p[1] >= 0.5), points[-1])
        x, y = place(*at).split(",")
        parts.append(f'<text x="{float(x) + 6}" y="{float(y) + 4}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--coding-s", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cases = [
        (name, Case(hosts, parity, mtbf * DAY_S, interval, args.coding_s, args.days * DAY_S))
        for hosts in (4, 16, 64)
        for interval in (10.0, 300.0)
        for mtbf in (1.0, 30.0)
        for name, parity in SCHEMES.items()
    ]
    for seed, (name, case) in enumerate(cases):
        share, error = simulate(case, args.runs, seed)
        found = {"simulated": share, "error": error, "closed": closed_form(case)}
        rows.append({"scheme": name, **asdict(case), **found})
    worst = max(abs(row["simulated"] - row["closed"]) / row["error"] for row in rows)
    if args.svg:
        curves = {}
        for hosts in (64, 1000):
            for name, parity in SCHEMES.items():
                case = Case(hosts, parity, DAY_S, 10.0, args.coding_s, args.days * DAY_S)
                curves[f"{hosts} hosts, {name}"] = [
                    (days, closed_form(replace(case, mtbf_s=days * DAY_S))) for days in np.logspace(-2, 3, 120).tolist()
                ]
        args.svg.write_text(svg(curves, f"Probability that {args.days:g} days pass without a step that memory lost"))
    if args.json:
        print(json.dumps({"cases": rows, "worst_deviation_in_standard_errors": worst}))
    else:
        print(f"{'hosts':>5} {'MTBF':>7} {'interval':>9}  {'scheme':10} {'simulated':>10} {'closed form':>12}")
        for row in rows:
            print(
                f"{row['hosts']:>5} {row['mtbf_s'] / DAY_S:>5.0f} d {row['interval_s']:>7.0f} s  "
                f"{row['scheme']:10} "
                f"{row['simulated']:>10.4f} {row['closed']:>12.4f}"
            )
        print(f"largest deviation of simulation from closed form: {worst:.1f} standard errors")


if __name__ == "__main__":
    main()
