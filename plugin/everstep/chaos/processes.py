"""Faults of workers: killed, stopped, gone."""

import random
from dataclasses import dataclass
from signal import SIGKILL, SIGSEGV, SIGSTOP, Signals
from typing import ClassVar

from everstep.chaos.fault import Fault, Injection
from everstep.chaos.target import Target
from everstep.chaos.view import View

HEALS = "the others finish the step with all its slots; the group comes back warm and heals from one of them"


@dataclass(kw_only=True)
class _OneWorker(Fault):
    """A signal to one worker of a group."""

    signum: ClassVar[Signals]

    rank: int | None = None
    """Hit this rank. None: one that is drawn."""

    def why_not(self, run: View) -> str | None:
        if self.rank is not None and self.group is not None and self.rank >= len(run.workers(self.group)):
            return f"group {self.group} has no rank {self.rank}"
        return super().why_not(run)

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group = self.victim(target.run, choose)
        worker = choose.choice(target.run.workers(group)) if self.rank is None else target.run.workers(group)[self.rank]
        return Injection(
            strike=lambda: target.signal([worker], self.signum),
            target_group=group,
            pids=[worker.pid],
            fields={"target_rank": worker.rank},
            undo=target.go_on_later([worker]) if self.duration_s else None,
        )


class KillWorker(_OneWorker):
    name = "kill-worker"
    breaks = "SIGKILL to one worker of a group."
    undone = "An instant."
    expected = f"The agent kills the group's other workers and starts all again; {HEALS}."
    signum = SIGKILL


class Segfault(_OneWorker):
    name = "segfault"
    breaks = "SIGSEGV to one worker, as a faulty kernel or driver would cause."
    undone = "An instant."
    expected = f"As kill-worker: {HEALS}."
    signum = SIGSEGV


class Hang(_OneWorker):
    name = "hang"
    breaks = "SIGSTOP to one worker, for ever."
    undone = "The watchdog kills the group after stall_timeout_s (before its first step: startup_timeout_s)."
    expected = f"The others wait for a gradient sum or a quorum until it times out, then go on; {HEALS}."
    signum = SIGSTOP


@dataclass(kw_only=True)
class StopWorker(_OneWorker):
    name = "stop-worker"
    breaks = "SIGSTOP to one worker for a while."
    undone = "SIGCONT after duration_s."
    expected = (
        "The others wait for it, or go on without it once a wait has timed out; it goes on where it was and takes part "
        "again. Stopped for longer than stall_timeout_s, its group is started again."
    )
    signum = SIGSTOP

    duration_s: float = 4.0


class KillGroup(Fault):
    name = "kill-group"
    breaks = "SIGKILL to all workers of a group."
    undone = "An instant."
    expected = f"The agent starts them again; {HEALS}."

    def plan(self, target: Target, choose: random.Random) -> Injection:
        return kill_workers(target, [self.victim(target.run, choose)])


@dataclass(kw_only=True)
class KillSeveral(Fault):
    name = "kill-several"
    breaks = "SIGKILL to all workers of several groups at once."
    undone = "An instant."
    expected = (
        "The groups that are left finish the step with all its slots, one of them at least; the others heal from them."
    )

    count: int = 2
    """How many groups."""

    def never(self, run: View) -> str | None:
        return None if run.groups > self.count else f"it has {run.groups} groups, and one has to be left"

    def why_not(self, run: View) -> str | None:
        return self.why_no_group(run, self.count)

    def plan(self, target: Target, choose: random.Random) -> Injection:
        return kill_workers(target, sorted(choose.sample(target.run.candidates(self.count), self.count)))


class KillAll(Fault):
    name = "kill-all"
    breaks = "SIGKILL to all workers of all groups at once: nobody holds the state any more."
    undone = "An instant."
    expected = (
        "The run goes on from the newest snapshot in its keepers, or without snapshots from its checkpoint on disk, or "
        "without either from the first step. Steps since then are computed again, with the same batches."
    )

    def never(self, run: View) -> str | None:
        return "it hits every group, and some are spared" if run.spared else None

    def why_not(self, run: View) -> str | None:
        return None if run.taking_part else "no group takes part"

    def plan(self, target: Target, choose: random.Random) -> Injection:
        return kill_workers(target, [group for group in target.run.group_ids if target.run.workers(group)])


def kill_workers(target: Target, groups: list[int]) -> Injection:
    """All workers of these groups at once."""
    workers = [worker for group in groups for worker in target.run.workers(group)]
    return Injection(
        strike=lambda: target.signal(workers, SIGKILL),
        target_group=groups if len(groups) > 1 else groups[0],
        pids=[worker.pid for worker in workers],
    )


KINDS = (KillWorker, KillGroup, KillSeveral, KillAll, StopWorker, Hang, Segfault)
