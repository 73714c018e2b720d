"""A group that joins others with a large state: what its healing takes, what it costs their steps, and what is lost
when somebody dies meanwhile.

    export PYTHONPATH=plugin:tests/step
    python tests/step/healing.py [--gb 2] [--mbyte 100] [--step-s 2] [--heals 5] [--kills 0]

Three groups, and a joiner that is killed and started again for each heal. A slot is a wait, as for a device that
computes while the processor has nothing to do. `--mbyte`: each source's connections are held to that rate, as its link
would. `--kills`: so many of the heals are disturbed by the death of a group that is drawn, at a moment that is drawn.
What arrives is compared to the bit (`member.ToyWork.heal`), and so is what each group commits. Status 0 only if no step
was lost or made twice.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from harness import DEADLINE_S, ENDLESS, Rank, Run, check_states, newest

JOINER = 3
SLOTS = 12


class Groups:
    """Three groups that train, and one that joins again and again."""

    def __init__(self, run_dir: Path, context, *, step_s: float, **options: float) -> None:
        self.run = Run(run_dir, context, join_timeout_s=5.0, heartbeat_timeout_s=2.0, groups=JOINER + 1)
        self._options = {"slots": SLOTS, "slot_s": step_s * JOINER / SLOTS, "reduce_s": 20, "heal_s": 20} | options
        self.ranks = {group: self._start(group) for group in range(JOINER)}
        self._older: list[Rank] = []

    def _start(self, group: int) -> Rank:
        return self.run.group(group, steps=ENDLESS, heartbeat_s=2.0, quorum_s=30, **self._options)

    def join(self) -> Rank:
        self.ranks[JOINER] = self._start(JOINER)
        return self.ranks[JOINER]

    def kill(self, group: int) -> None:
        self.ranks[group].kill()
        self._older.append(self.ranks.pop(group))

    def restart(self) -> None:
        for group in {*range(JOINER + 1)} - self.ranks.keys():
            self.ranks[group] = self._start(group)

    def until_whole(self) -> None:
        """Wait for a step that all groups have a part in."""
        begun = time.monotonic()
        while True:
            for rank in self.ranks.values():
                rank.catch_up()
                assert rank.process.is_alive(), "a group ended by itself"
            latest = [rank.commits[max(rank.commits)] for rank in self.ranks.values() if rank.commits]
            if len(latest) == JOINER + 1 and all(len(one["groups"]) == JOINER + 1 for one in latest):
                return
            assert time.monotonic() - begun < DEADLINE_S, f"groups stay apart: {[one['groups'] for one in latest]}"
            time.sleep(0.05)

    def judge(self) -> None:
        """Every step was committed once, in its right state, by each group that did."""
        steps = set[int]()
        for rank in [*self.ranks.values(), *self._older]:
            check_states(rank, SLOTS)
            steps |= rank.commits.keys()
        assert steps == set(range(1, max(steps) + 1)), "a step is lost"

    def cpu_s(self) -> float:
        return sum(sum(psutil.Process(rank.process.pid).cpu_times()[:2]) for rank in self.ranks.values())


def disturbed(groups: Groups, draw: random.Random, within_s: float) -> None:
    """A heal in which somebody dies."""
    groups.join()
    time.sleep(draw.uniform(0, within_s))
    groups.kill(draw.randrange(JOINER + 1))
    time.sleep(draw.uniform(0, 1.0))
    groups.restart()
    groups.until_whole()
    groups.kill(JOINER)


def measured(groups: Groups) -> dict[str, float]:
    """A heal that is left alone: seconds of a step before and during it, its rate, and processor seconds."""
    others = [groups.ranks[group] for group in range(JOINER)]
    goal = newest(others) + 6
    for rank in others:
        rank.until(goal)
    groups.join().first()
    others[0].catch_up()
    times = {step: commit["time"] for step, commit in others[0].commits.items()}
    took = {later: times[later] - times[earlier] for earlier, later in itertools.pairwise(sorted(times))}
    joined = [e["step"] for e in groups.run.events("quorum") if JOINER in e["joiners"] and e["step"] > goal - 4]
    heal = groups.run.events("heal")[-1]
    groups.kill(JOINER)
    return {
        "quiet_s": statistics.median(took[step] for step in range(goal - 3, goal + 1)),
        "during_s": statistics.mean(took[step] for step in sorted({*joined} & took.keys())),
        "longest_s": max(took[step] for step in {*joined} & took.keys()),
        "steps": len({*joined}),
        "mb_per_s": heal["bytes"] / heal["took_s"] / 1e6,
        "sources": len(heal["source_groups"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--mbyte", type=float, default=100.0)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--heals", type=int, default=5)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["member"])
    size = {"ballast": int(options.gb * 1e9 / 4), "heal_bytes_per_s": int(options.mbyte * 1e6)}
    with tempfile.TemporaryDirectory() as folder:
        groups = Groups(Path(folder), context, step_s=options.step_s, **size)
        try:
            for rank in groups.ranks.values():
                rank.first()
            for _ in range(options.heals):
                print({name: round(value, 3) for name, value in measured(groups).items()}, flush=True)
            draw, heals_s = random.Random(options.seed), options.gb * 1e3 / max(options.mbyte, 300.0)
            for number in range(options.kills):
                disturbed(groups, draw, 2.0 + heals_s)
                if number % 10 == 9:
                    groups.judge()
                    print(f"{number + 1} kills, {newest(list(groups.ranks.values()))} steps", flush=True)
            groups.judge()
            failed = groups.run.events("heal_failed")
            print(f"{len(groups.run.events('heal'))} heals, {len(failed)} failed", {e["reason"] for e in failed})
        finally:
            groups.run.close()
    return 0


if __name__ == "__main__":
    os.environ |= {"RUST_LOG": "error", "OMP_NUM_THREADS": "1"}
    sys.exit(main())
