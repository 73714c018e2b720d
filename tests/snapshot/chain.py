"""Chained deaths of one run, also during a restore, of slow members too; it starts again with other groups."""

import contextlib
import random
import threading
import time
from collections import Counter

from snapshot_cluster import Cluster, assert_is_step, slowed, state_of

CODING_S = 2.0
KINDS = {
    "trainers": None, "host": None, "hosts": None, "keepers": None, "keepers while it restores": None,
    "a host while it restores": None, "keepers stand still at the start": None,
    "a keeper stands still": (10_000.0, 0.05), "a keeper is slow": (0.7, 0.02),
    "a keeper stands still for the deadline": (CODING_S, 10_000.0),
}  # fmt: skip
"""What happens before or while all trainers die -> seconds for which a keeper is stopped and runs, in turn."""


class Chain:
    """A run that dies and goes on, again and again. Its keepers are processes; its trainers' copiers are in this
    process, so they end after a whole operation of the copier (test_publication.py kills within one)."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._seed = seed
        self._most = self._chance.choice((3, 4, 6))
        self._parity = self._chance.choice((1, 1, 2))
        self._scale = self._chance.choice((1, 4))
        self.history, self.step, self.protected = 1, 0, 0
        self.lost: Counter[int] = Counter()
        """Steps that had to be made again -> how often."""

    def run(self, deaths: int) -> None:
        with Cluster(self._most, parity=self._parity, coding_timeout_s=CODING_S, interval=2) as run:
            self._take_steps(run)
            for number in range(deaths):
                self._die(run, number)
                self._take_steps(run)

    def _take_steps(self, run: Cluster, settle: bool | None = None) -> None:
        """Commit some steps, with or without waiting for the keepers; note the newest step reported as protected."""
        for _ in range(self._chance.randint(2, 9)):
            self.step += 1
            waits = self._chance.random() < 0.7 if settle is None else settle
            run.commit(self.step, members=run.groups, history=self.history, scale=self._scale, settle=waits)
            time.sleep(self._chance.choice((0.0, 0.01, 0.05)))
        said = [step for _, kind, step, _ in run.events if kind == "snapshot_protected"]
        self.protected = max([self.protected, *said])
        run.events.clear()

    def _die(self, run: Cluster, number: int) -> None:
        chance = self._chance
        kind = chance.choice(list(KINDS))
        with contextlib.ExitStack() as stack:
            if duty := KINDS[kind]:
                stack.enter_context(slowed(run, chance.choice(run.groups), *duty))
                self._take_steps(run, settle=kind == "a keeper is slow")
            run.kill_trainers()
        lost: list[int] = []
        if kind in ("host", "hosts"):
            count = 1 if kind == "host" else min(self._parity, len(run.groups) - 1)
            lost = chance.sample(run.groups, count)
            for group in lost:
                run.lose_host(group)
        killed = list(lost)
        if kind.startswith("keepers"):  # these are killed or stopped
            killed = chance.sample(run.groups, chance.randint(1, len(run.groups)))
        elif kind == "a host while it restores":
            killed = [chance.choice(run.groups)]
        if kind == "keepers":
            for group in killed:
                run.kill_keeper(group)
        for group in set(range(self._most)).difference(lost):  # a host that comes back adopts what it held
            run.start_keeper(group)
        run.tensors = dict.fromkeys(range(self._most), state_of(1, 0, self._scale).tensors)

        after_s, starter = chance.random() * 0.05, chance.randrange(self._most)

        def in_the_restore() -> None:
            time.sleep(after_s)
            for group in killed:
                if kind == "a host while it restores":
                    run.lose_host(group)
                else:
                    run.kill_keeper(group)
                    run.start_keeper(group)

        beside = threading.Thread(target=in_the_restore if kind.endswith("restores") else lambda: None)
        beside.start()
        with contextlib.ExitStack() as stack:
            for group in killed if kind == "keepers stand still at the start" else ():
                stack.enter_context(slowed(run, group, chance.uniform(0.5, 5.0), 10_000.0))
            found = run.recover(group=starter, patience_s=60)
        beside.join()
        told = (self._seed, number, kind, lost, killed, found.decision.step, self.protected, found.decision.reasons)
        assert found.decision.step >= self.protected, told
        if found.restored is None:
            assert self.protected == 0, told
            self.step = 0
        else:
            assert_is_step(found.restored, found.decision.step, scale=self._scale)
        self.lost[self.step - found.decision.step] += 1
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
