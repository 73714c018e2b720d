"""Everything dies at a random instant, some keepers with their memory: what is resumed is bit for bit a committed step,
and never behind the newest one that every group had coded."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chain import Chain
from snapshot_cluster import Cluster, assert_is_step, state_of, wait_until


def trial(seed: int) -> int:
    """One run to its death and back. Returns how many committed steps have to be computed again."""
    chance = random.Random(seed)
    groups = chance.choice((2, 3, 5, 6))
    with Cluster(groups, coding_timeout_s=4.0) as run:
        run.kill_trainers()
        order = [str(run.run_dir), str(run.home), str(groups), str(seed)]
        said = run.home / "said"
        with said.open("wb") as output:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, str(Path(__file__).with_name("trainers.py")), *order]
            trainers = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            wait_until(lambda: "committed 2\n" in said.read_text(), 60)
            time.sleep(chance.random() * 1.5)
        finally:
            trainers.kill()
            trainers.wait()
        lost = chance.sample(range(groups), chance.choice((0, 1)))
        killed = [group for group in range(groups) if group not in lost and chance.random() < 0.3]
        for group in lost:
            run.lose_host(group)
        for group in killed:
            run.kill_keeper(group)
        for group in killed:
            run.start_keeper(group)
        words = [line.split() for line in said.read_text().splitlines()]
        scale = next(int(value) for name, value in words if name == "scale")
        committed = max(int(value) for name, value in words if name == "committed")
        coded = max([int(value) for name, value in words if name == "coded"], default=0)
        run.tensors = dict.fromkeys(range(groups), state_of(1, 0, scale).tensors)
        found = run.recover(group=chance.randrange(groups), patience_s=120)  # who is there answers, however late
        assert found.decision.step >= coded, (seed, found.decision.reasons)
        if found.restored is not None:
            assert_is_step(found.restored, found.decision.step, scale=scale)
        return committed - found.decision.step


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_resumed_after_the_death_of_everything_is_never_behind_the_newest_coded_step(seed):
    trial(seed)


@pytest.mark.parametrize(
    ("seed", "deaths"), [(0, 4), *(pytest.param(seed, 100, marks=pytest.mark.slow) for seed in range(1, 11))]
)
@pytest.mark.timeout(3600)
def test_death_after_death_nothing_that_was_said_to_be_protected_is_lost(seed, deaths):
    chain = Chain(seed)
    chain.run(deaths)
    assert sum(chain.lost.values()) == deaths
