"""Chained deaths: all trainers, hosts, keepers, frozen members, starts with more or fewer groups, one after the other.

python chain.py DEATHS SEED
"""

import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter

from everstep.snapshot import peers
from snapshot_cluster import Cluster, assert_is_step, state_of


class Chain:
    """A run that dies and goes on, again and again. Its keepers are processes; its trainers' copiers are here, where
    they end between two instructions of the copier and not within one (tests of publication do that)."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._seed = seed
        self._most = self._chance.choice((3, 4, 6))
        self._parity = self._chance.choice((1, 1, 2))
        self._scale = self._chance.choice((1, 4))
        self.history, self.step, self.protected = 1, 0, 0
        self.lost: Counter[int] = Counter()
        """How often so many steps had to be made again."""
        self.kinds: Counter[str] = Counter()

    def run(self, deaths: int) -> None:
        with Cluster(self._most, parity=self._parity, coding_timeout_s=2.0, interval=2) as run:
            self._take_steps(run)
            for number in range(deaths):
                self._die(run, number)
                self._take_steps(run)

    def _take_steps(self, run: Cluster) -> None:
        """Some commits, with the keepers' work done between them or not; the newest that is said to be protected."""
        for _ in range(self._chance.randint(2, 9)):
            self.step += 1
            settle = self._chance.random() < 0.7
            run.commit(self.step, members=run.groups, history=self.history, scale=self._scale, settle=settle)
            time.sleep(self._chance.choice((0.0, 0.01, 0.05)))
        said = [step for _, kind, step, _ in run.events if kind == "snapshot_protected"]
        self.protected = max([self.protected, *said])
        run.events.clear()

    def _die(self, run: Cluster, number: int) -> None:
        chance = self._chance
        kind = chance.choice(("trainers", "host", "hosts", "keepers", "frozen"))
        frozen = self._freeze(run) if kind == "frozen" else None
        if frozen is not None:
            self._take_steps(run)
        run.kill_trainers()
        lost: list[int] = []
        if kind in ("host", "hosts"):
            count = 1 if kind == "host" else min(self._parity, len(run.groups) - 1)
            lost = chance.sample(run.groups, count)
            for group in lost:
                run.lose_host(group)
        killed = list(lost)
        if kind == "keepers":
            killed = chance.sample(run.groups, chance.randint(1, len(run.groups)))
            for group in killed:
                run.kill_keeper(group)
        if frozen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(frozen, signal.SIGCONT)
        alive = [group for group in range(self._most) if group not in lost]
        for group in alive:  # a host that comes back looks for what it held
            run.start_keeper(group)
        run.tensors = dict.fromkeys(range(self._most), state_of(1, 0, self._scale).tensors)
        found = run.recover(group=chance.randrange(self._most), patience_s=60)
        told = (self._seed, number, kind, lost, killed, found.decision.step, self.protected, found.decision.reasons)
        assert found.decision.step >= self.protected, told
        if found.restored is None:
            assert self.protected == 0, told
            self.step = 0
        else:
            assert_is_step(found.restored, found.decision.step, scale=self._scale)
        self.lost[self.step - found.decision.step] += 1
        self.kinds[kind] += 1
        self.step, self.history = found.decision.step, self.history + 1
        run.groups = sorted(chance.sample(range(self._most), chance.randint(2, self._most)))
        for group in run.groups:
            run.start_keeper(group)
        run.tensors = {}
        run.events.clear()
        if found.restored is not None:
            run.restart(found, start=f"{self._seed}-{number}", scale=self._scale, history=self.history)
        else:
            for group in run.groups:
                run.start_copier(group)

    def _freeze(self, run: Cluster) -> int:
        places = {place.group: place for place in peers.read_places(run.run_dir)}
        pid = places[self._chance.choice(run.groups)].pid
        os.kill(pid, signal.SIGSTOP)
        return pid


if __name__ == "__main__":
    chain = Chain(int(sys.argv[2]))
    try:
        chain.run(int(sys.argv[1]))
    finally:
        print("CHAIN", sys.argv[2], sum(chain.lost.values()), dict(chain.kinds), sorted(chain.lost.items()), flush=True)
