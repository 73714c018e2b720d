"""Compute, in closed form, the probability that a run can always be restored from memory.

    python bench/survival.py [--days 30] [--svg docs/snapshot-survival.svg]

The model: each of n hosts holds one keeper and fails with its memory, independently, at a constant rate. Once the
next snapshot is published and coded, a failed host's part is held again, by the remaining hosts or a new one. So
the *window* is the interval between snapshots plus the time to copy and code one. If more hosts of one parity
group (of about eight) fail within one window than parity covers, the step of that window is lost; if all trainers
die at that moment, only the disk is left. (As long as one trainer lives, its own copy of the state does too.) With
p = 1 - exp(-window / MTBF), a parity group of n survives a window with probability P(Binomial(n, p) <= parity). A
run survives if all its parity groups survive all windows.

This follows the section on reliability of REFT (arXiv 2310.12670), for rotated parity of one or two shards.
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from everstep.snapshot.parity import Domains

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
    """Time between snapshots: steps between them times the time of a step."""
    coding_s: float
    """Time to copy a snapshot and to code its parity."""
    length_s: float
    parity_group: int = 8

    @property
    def window_s(self) -> float:
        return self.interval_s + self.coding_s

    @property
    def windows(self) -> int:
        return max(1, round(self.length_s / self.window_s))


def group_sizes(hosts: int, size: int) -> list[int]:
    """Return the sizes of a run's parity groups."""
    return [len(each) for each in Domains(tuple(range(hosts)), size, 1, (0,) * hosts).groups]


def closed_form(case: Case) -> float:
    """Return the probability that the run survives every window."""
    p = -math.expm1(-case.window_s / case.mtbf_s)
    kept = 1.0
    for n in group_sizes(case.hosts, case.parity_group):
        m = min(case.parity, n - 1)
        lost = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(m + 1, n + 1))
        kept *= 1 - lost
    return math.exp(case.windows * math.log(kept)) if kept > 0 else 0.0


def svg(curves: dict[str, list[tuple[float, float]]], title: str) -> str:
    """Plot the probability of survival against MTBF (logarithmic), one line per curve."""
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
    parser.add_argument("--days", type=float, default=30.0, help="length of the run")
    parser.add_argument("--coding-s", type=float, default=2.0, help="seconds to copy and code a snapshot")
    parser.add_argument("--svg", type=Path, help="file to plot to")
    args = parser.parse_args()
    curves = {}
    for hosts in (64, 1000):
        for name, parity in SCHEMES.items():
            case = Case(hosts, parity, DAY_S, 10.0, args.coding_s, args.days * DAY_S)
            curves[f"{hosts} hosts, {name}"] = [
                (days, closed_form(replace(case, mtbf_s=days * DAY_S))) for days in np.logspace(-2, 3, 120).tolist()
            ]
            for days in (1.0, 30.0, 365.0):
                kept = closed_form(replace(case, mtbf_s=days * DAY_S))
                print(f"{hosts:>5} hosts, {name:10} MTBF {days:>4.0f} d: {kept:.4f}")
    if args.svg:
        args.svg.write_text(svg(curves, f"Probability that {args.days:g} days pass without losing a step from memory"))


if __name__ == "__main__":
    main()
