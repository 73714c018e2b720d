"""Faults that only tests make, in a table: those of a worker in the middle of something (in_worker.py carries them
out), those of semi-synchronous rounds, and a damaged snapshot.

    python -m more_faults chaos RUN_DIR --campaign FILE.toml    # `everstep chaos`, and
    python -m more_faults trial CONFIG.toml …                   # `scripts/chaos_run.sh`, with these kinds besides
"""

import sys
from dataclasses import dataclass
from signal import SIGKILL, SIGSEGV, SIGSTOP
from typing import ClassVar

from everstep import cli
from everstep.chaos import trial
from everstep.chaos.fault import Fault, Injection
from everstep.chaos.kinds import FAULTS, KillHost, KillLighthouse, KillWorker, own_segments
from everstep.chaos.orders import Ordered
from everstep.semi.worker_store import folder_of
from everstep.snapshot.buffer import HEADER_BYTES
from everstep.snapshot.peers import read_places
from everstep.snapshot.segment import BUFFERS

IN_WORKER = "in_worker.faults"
"""What `--override.imports` has to name for workers to know these orders."""


@dataclass(kw_only=True)
class Given(Ordered):
    """Carried out by in_worker.py, in the trainer's phase `at`; "": at once."""

    at: ClassVar[str] = ""
    kills_first: ClassVar[bool] = False
    """Whether the group is killed now, and the order is for its next workers."""
    breaks = "See in_worker.py."

    duration_s: float = 6.0

    def plan(self, target, choose):
        group = self.victim(target.run, choose)
        takers = self.takers(target.run, group)
        workers = target.run.workers(group) if self.kills_first else []

        def strike():
            target.signal(workers, SIGKILL)
            self.order(target, *takers, at=self.at, later=self.kills_first)

        hit = group if takers == [group] else self.hit(group, takers)
        return Injection(strike=strike, target_group=hit, pids=[worker.pid for worker in workers])

    def takers(self, run, group):
        """The groups that the order is for, when `group` is hit."""
        return [group]

    def hit(self, group, takers):
        """The groups that are hit for certain."""
        return sorted((group, *takers))


class KillHealSource(Given):
    """A group is killed, and the group that its next workers heal from while it sends them its state."""

    kills_first = True

    def why_not(self, run):
        if (why := self.why_no_group(run, 2)) is not None:
            return why
        return None if self._joiners(run) else "the group that would be healed from is spared"

    def victim(self, run, choose):
        return choose.choice(self._joiners(run))

    def takers(self, run, group):
        # torchft heals the first that is behind from the first that is not, in the order of group ids.
        return [min(run.taking_part - {group})]

    def _joiners(self, run):
        allowed = run.candidates(2)
        return [group for group in allowed if self.takers(run, group)[0] in allowed]


class FirstSlots(Given):
    """Hits the group that has the first slots, which writes checkpoints: usually the lowest that takes part."""

    def victim(self, run, choose):
        return min(run.candidates()) if self.group is None else self.group


class KillAdopter(Given):
    """A group is killed, and the first group that takes one of its workers over, within that worker's round."""

    kills_first = True

    def why_not(self, run):
        return self.why_no_group(run, 2)

    def victim(self, run, choose):
        return choose.choice(run.candidates(2)) if self.group is None else self.group

    def takers(self, run, group):
        # Who adopts depends on what each holds when the group is found to be gone.
        return sorted(set(run.candidates(2)) - {group})

    def hit(self, group, takers):
        return group  # the adopter says itself that it dies


def files_by_round(folder, worker):
    """The files of a worker's states after rounds, of all ranks."""
    found = {}
    for path in folder.glob(f"worker-{worker}.rank-*"):
        found.setdefault(int(path.name.split(".")[2].removeprefix("round-")), []).append(path)
    return found


class KillHostAndStates(KillHost):
    """As kill-host, and the newest states of its workers are lost with it."""

    def why_not(self, run):
        if (why := super().why_not(run)) is not None:
            return why
        if not self._carriers(run):
            return "no group that may be hit carries a worker now"
        folder = folder_of(run.run_dir)
        if any(len(files_by_round(folder, worker)) < 2 for worker in range(len(run.owners))):
            return "not every worker has a state of an earlier round yet"
        return None

    def victim(self, run, choose):
        return choose.choice(self._carriers(run))

    def _carriers(self, run):
        return [group for group in run.candidates() if group in run.owners]

    def plan(self, target, choose):
        injection, folder = super().plan(target, choose), folder_of(target.run_dir)
        workers = [worker for worker, owner in enumerate(target.run.owners) if owner == injection.target_group]
        kill = injection.strike

        def strike():
            kill()
            for worker in workers:
                written = files_by_round(folder, worker)
                for path in written[max(written)]:
                    path.unlink(missing_ok=True)

        injection.strike = strike
        return injection


class CorruptSnapshot(Fault):
    """One bit of a published snapshot in memory flips."""

    breaks = "One bit of a published snapshot in memory flips."
    on = frozenset({"local"})

    def why_not(self, run):
        return None if published(run.run_dir) else "no snapshot is in this machine's memory yet"

    def plan(self, target, choose):
        group, file, size = choose.choice(published(target.run_dir))
        at, bit = HEADER_BYTES + choose.randrange(size), 1 << choose.randrange(8)

        def strike():
            with open(file, "r+b") as buffer:
                buffer.seek(at)
                byte = buffer.read(1)
                buffer.seek(at)
                buffer.write(bytes([byte[0] ^ bit]))

        return Injection(strike=strike, fields={"of_group": group, "file": str(file), "at_byte": at})


def published(run_dir):
    """Published data buffers on this machine: group, file, payload bytes."""
    found = []
    for segment in own_segments(run_dir, read_places(run_dir)):
        for rank in [rank for group, rank in segment.columns() if group == segment.group]:
            for index, header in zip(range(BUFFERS), segment.headers("data", rank), strict=True):
                if header is not None:
                    found.append((segment.group, segment.file("data", rank, index), header.payload_bytes))
    return found


@dataclass(kw_only=True)
class StopLighthouse(KillLighthouse):
    """It takes connections and answers nothing, as behind a broken network. Its supervisor replaces it."""

    signum = SIGSTOP


def row(name, kind=Given, **settings):
    """A kind of fault of this name."""
    return type(name, (kind,), {"name": name, "__doc__": name, **settings})


ROWS = (
    row("exception", at="compute"),
    row("segfault", KillWorker, signum=SIGSEGV),
    row("flipped-weight", at="quorum"),
    row("stop-lighthouse", StopLighthouse),
    row("corrupt-snapshot", CorruptSnapshot),
    row("clock-jump"),
    row("partition"),
    row("hang-gil"),
    row("kill-and-corrupt-heal", kills_first=True),
    row("kill-during-heal", at="heal", kills_first=True),
    row("kill-during-connect", at="connect", kills_first=True),
    row("kill-during-snapshot"),
    row("kill-during-checkpoint", FirstSlots, at="checkpoint"),
    row("kill-heal-source", KillHealSource),
    row("kill-during-sum"),
    row("kill-mid-round", at="half-round"),
    row("kill-adopter", KillAdopter, at="adopt"),
    row("kill-host-and-states", KillHostAndStates),
)
MORE = {kind.name: kind for kind in ROWS}


if __name__ == "__main__":
    FAULTS.update(MORE)
    door, *words = sys.argv[1:]
    sys.exit(trial.main(words) if door == "trial" else cli.main([door, *words]))
