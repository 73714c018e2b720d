"""Sums over many seeds of what their runs cost and find, compared with those recorded last: a change that breaks no
promise may ask, compute, send or wait more, or find less. The faults of a seed are in its plan, so a sum moves little
if only the order of events changes, and only by what the seeds add whose runs have changed."""

import csv
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

RECORDED = Path(__file__).with_name("costs.tsv")
"""A column for each figure. Row MOST: the most that one run adds to the figure. Row SPREAD: the standard deviation of
this by chance, from runs with the same faults and all else drawn anew three times: 80 of `default`, 15 of each
variant. The other rows: the sums of the first seeds of a name, as `scripts/simulate --record` writes them."""
PRINTS = RECORDED.with_name("prints.txt")
"""A line for each name: a checksum of each seed's figures."""
MOST, SPREAD = ("most", 1), ("spread", 1)
SURE = 4.0
"""Standard deviations by which a sum does not move by chance."""
PARTS = (15, 100, 1000)
"""Numbers of first seeds for which sums are recorded, beside the sum of all."""

Sums = dict[str, float]


def recorded() -> dict[tuple[str, int], Sums]:
    with RECORDED.open() as file:
        rows = list(csv.reader(file, delimiter="\t"))
    return {
        (name, int(count)): dict(zip(rows[0][2:], map(float, sums), strict=True)) for name, count, *sums in rows[1:]
    }


def summed(runs: Sequence[Counter[str]], most: Sums) -> Sums:
    return {figure: round(float(sum(min(run[figure], at_most) for run in runs)), 1) for figure, at_most in most.items()}


def prints() -> dict[str, list[str]]:
    lines = (line.partition("\t") for line in PRINTS.read_text().splitlines())
    return {name: told.split() for name, _, told in lines}


def printed(runs: Sequence[Counter[str]]) -> list[str]:
    return [f"{zlib.crc32(str(sorted(run.items())).encode()) & 0xFFFF:04x}" for run in runs]


def changed(seeds: str, runs: Sequence[Counter[str]]) -> list[str]:
    """Return the figures of these seeds that differ from the recorded ones by more than chance."""
    found, every = [], recorded()
    other = [before != now for before, now in zip(prints().get(seeds, ()), printed(runs), strict=False)]
    for (name, count), before in every.items():
        if name == seeds and count <= len(runs):
            for figure, now in summed(runs[:count], every[MOST]).items():
                if abs(now - before[figure]) > SURE * every[SPREAD][figure] * math.sqrt(sum(other[:count])):
                    found.append(f"{figure} of {count} seeds: {before[figure]:.0f} -> {now:.0f}")
    return found


def same(runs: Mapping[str, Sequence[Counter[str]]]) -> bool:
    """Return whether the runs of each name are those that are recorded."""
    before = prints()
    return all(printed(some) == before.get(name, [])[: len(some)] for name, some in runs.items())


def record(seeds: str, runs: Sequence[Counter[str]]) -> None:
    every = recorded()
    told = prints() | {seeds: printed(runs)}
    PRINTS.write_text("".join(f"{name}\t{' '.join(each)}\n" for name, each in told.items()))
    every |= {(seeds, n): summed(runs[:n], every[MOST]) for n in (*PARTS, len(runs)) if n <= len(runs)}
    with RECORDED.open("w") as file:
        rows = csv.writer(file, delimiter="\t", lineterminator="\n")
        rows.writerow(("seeds", "count", *every[MOST]))
        rows.writerows((*place, *(f"{sum_:.10g}" for sum_ in sums.values())) for place, sums in every.items())
