"""Groups that die while one heals: the long form of what tests/quorum/test_heal.py draws.

Three groups, and a joiner with a large state that is killed and started again for each heal. A slot is a wait, as for a
device that computes while the processor has nothing to do.
"""

import random
import time

import pytest

from harness import DEADLINE_S, ENDLESS, Rank, Run, check_states

JOINER = 3
SLOTS = 12
STEP_S = 0.5
STATE = {"ballast": 50_000_000, "heal_bytes_per_s": 33_000_000}
HEALS_S = 4.0
"""About what a heal takes."""


class Groups:
    """Three groups that train, and one that joins again and again."""

    def __init__(self, run_dir, context) -> None:
        self.run = Run(run_dir, context, join_timeout_s=5.0, heartbeat_timeout_s=2.0, groups=JOINER + 1)
        self.ranks = {group: self._start(group) for group in range(JOINER)}
        self._older: list[Rank] = []

    def _start(self, group: int) -> Rank:
        waits = {"heartbeat_s": 2.0, "quorum_s": 30, "reduce_s": 20, "heal_s": 20}
        return self.run.group(group, steps=ENDLESS, slots=SLOTS, slot_s=STEP_S * JOINER / SLOTS, **waits, **STATE)

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


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_whoever_dies_while_a_group_heals_no_step_is_lost(tmp_path, context):
    groups, draw = Groups(tmp_path, context), random.Random(0)
    try:
        for rank in groups.ranks.values():
            rank.first()
        for _ in range(100):
            groups.restart()  # the joiner, and whoever died before
            time.sleep(draw.uniform(0, HEALS_S))
            groups.kill(draw.randrange(JOINER + 1))
            time.sleep(draw.uniform(0, 1.0))
            groups.restart()
            groups.until_whole()
            groups.kill(JOINER)
        groups.judge()
    finally:
        groups.run.close()
