"""Simulates runs with faults and judges them: many seeds, or one seed as a timeline."""

import argparse
import gc
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from simulation import costs, mutants
from simulation.faults import BREAKERS, KINDS
from simulation.world import DEFAULT, SEEDS, VARIANTS, Outcome, Settings, simulate

SHOWN = 5


def span(text: str) -> tuple[int, int]:
    """`A-B`, or `A` for both."""
    first, _, last = text.partition("-")
    low, high = int(first), int(last or first)
    if low > high:
        raise argparse.ArgumentTypeError(f"{text}: the first is larger than the last")
    return low, high


def parse(args: list[str] | None = None) -> argparse.Namespace:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=span, metavar="A-B", help="seeds to try; default: 0-1999, and the variants'")
    parser.add_argument("--groups", type=span, default=usual.groups, metavar="A-B", help="groups at the start")
    parser.add_argument("--ranks", type=span, default=usual.ranks, metavar="A-B", help="number of ranks of each group")
    parser.add_argument("--faults", type=int, default=usual.faults, help="number of faults in each run")
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults, separated by commas; default: %(default)s")
    parser.add_argument("--trace", type=int, metavar="SEED", help="run this seed alone and print a timeline")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes at a time")
    parser.add_argument("--record", action="store_true", help="record these runs' costs, to compare later runs with")
    parser.add_argument("--mutants", type=int, metavar="N", help="instead: try N drawn changes of the protocol's code")
    parser.add_argument("--draw", type=int, default=0, help="with --mutants: seed of the draw")
    parser.add_argument("--most", type=int, default=1000, help="with --mutants: most seeds for each")
    options = parser.parse_args(args)
    if unknown := sorted(set(options.kinds.split(",")) - set(BREAKERS)):
        parser.error(f"--kinds: no such faults: {', '.join(unknown)}")
    return options


def show(outcome: Outcome) -> None:
    for at, who, kind, step, text in outcome.trace:
        print(f"{at:10.4f}  {who:<10} {kind:<18} {'' if step is None else step:>4}  {text}")
    for violation in outcome.violations:
        print(f"{violation.at:10.4f}  VIOLATION  {violation.kind}: {violation.text}")


def campaign(settings: Settings, seeds: range, jobs: int, name: str = "", *, record: bool = False) -> bool:
    """Run all seeds and print a summary. Return whether none broke the promise and costs are as recorded."""
    begun, outcomes = time.monotonic(), []
    gc.freeze()  # no process of the pool looks through what was imported
    with ProcessPoolExecutor(jobs) as pool:
        for outcome in pool.map(partial(simulate, settings=settings), seeds, chunksize=8):
            outcomes.append(outcome)
            if outcome.violations:
                print(f"seed {outcome.seed}:")
                for violation in outcome.violations[:SHOWN]:
                    print(f"    {violation.at:9.3f} s  {violation.kind}: {violation.text}")
    fell = sum((outcome.fell for outcome in outcomes), Counter())
    bad = Counter(kind for outcome in outcomes for kind in {violation.kind for violation in outcome.violations})
    runs = [outcome.costs for outcome in outcomes]
    virtual_s, commits, applied = (sum(run[figure] for run in runs) for figure in ("virtual_s", "commit", "applied"))
    print(
        f"{len(outcomes)} seeds: {fell.total()} faults, {virtual_s:.0f} virtual seconds, {commits} commits, "
        f"{applied} applied, {time.monotonic() - begun:.0f} s"
    )
    print("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(fell.items())))
    print("violations: " + (", ".join(f"{kind} in {count} seeds" for kind, count in bad.most_common()) or "none"))
    if record:
        costs.record(name, runs)
    other = costs.changed(name, runs)
    for figure in other:
        print(f"    costs: {figure}")
    return not bad and not other


def main() -> int:
    options = parse()
    if options.mutants is not None:
        mutants.campaign(options.mutants, options.draw, options.most, options.jobs)
        return 0
    settings = Settings(options.groups, options.ranks, faults=options.faults, kinds=tuple(options.kinds.split(",")))
    if options.trace is not None:
        outcome = simulate(options.trace, settings, trace=True)
        show(outcome)
        return 1 if outcome.violations else 0
    if options.seeds is not None:
        first, last = options.seeds
        return 0 if campaign(settings, range(first, last + 1), options.jobs) else 1
    kept = []
    for name, (seeds, each) in {DEFAULT: (SEEDS, settings), **VARIANTS}.items():
        print(f"{name}:")
        named = name if name != DEFAULT or settings == Settings() else ""
        kept.append(campaign(each, seeds, options.jobs, named, record=options.record and bool(named)))
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
