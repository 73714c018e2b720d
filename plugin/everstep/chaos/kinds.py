"""All kinds of faults, by name."""

import contextlib
import difflib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import ClassVar

from everstep.chaos.fault import Fault, Injection
from everstep.chaos.target import Target
from everstep.chaos.view import View
from everstep.run.directory import LaunchError
from everstep.run.regular import is_own_directory
from everstep.run.token import read_token
from everstep.snapshot.peers import Place
from everstep.snapshot.segment import Segment, run_id


@dataclass(kw_only=True)
class KillWorker(Fault):
    name = "kill-worker"
    breaks = "SIGKILL to one worker of a group."
    signum: ClassVar[Signals] = SIGKILL

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
            procs=[worker],
            signum=self.signum,
            target_group=group,
            fields={"target_rank": worker.rank},
            lasts_s=self.duration_s if self.signum == SIGSTOP else 0.0,
        )


@dataclass(kw_only=True)
class StopWorker(KillWorker):
    name = "stop-worker"
    breaks = "SIGSTOP to one worker for a while, or with duration_s = 0 for ever, as one that hangs."
    signum = SIGSTOP

    duration_s: float = 4.0


@dataclass(kw_only=True)
class KillGroup(Fault):
    name = "kill-group"
    breaks = "SIGKILL to all workers of a group, or of `count` groups at once."

    count: int = 1
    """How many groups at once; more than one are drawn."""

    def never(self, run: View) -> str | None:
        return None if self.count in (1, *range(run.groups)) else f"it has {run.groups} groups, and one has to be left"

    def why_not(self, run: View) -> str | None:
        return self.why_no_group(run, self.count)

    def plan(self, target: Target, choose: random.Random) -> Injection:
        if self.count == 1:
            return kill_workers(target, [self.victim(target.run, choose)])
        return kill_workers(target, sorted(choose.sample(target.run.candidates(self.count), self.count)))


class KillAll(Fault):
    name = "kill-all"
    breaks = "SIGKILL to all workers of all groups at once: nobody holds the state any more."

    def never(self, run: View) -> str | None:
        return "it hits every group, and some are spared" if run.spared else None

    def why_not(self, run: View) -> str | None:
        return None if run.taking_part else "no group takes part"

    def plan(self, target: Target, choose: random.Random) -> Injection:
        return kill_workers(target, [group for group in target.run.group_ids if target.run.workers(group)])


class KillKeeper(Fault):
    name = "kill-keeper"
    breaks = "SIGKILL to the process that holds a group's snapshots. Its shared memory stays."

    def why_not(self, run: View) -> str | None:
        return None if self._groups(run) else "no keeper lives that may be hit"

    def _groups(self, run: View) -> list[int]:
        mine = run.group_ids if self.group is None else [self.group]
        return [group for group in mine if group not in run.spared and run.keepers(group)]

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group = choose.choice(self._groups(target.run))
        # The group itself is not hit: it goes on taking part.
        return Injection(procs=target.keepers(group), fields={"keeper_of": group})


class KillHost(Fault):
    name = "kill-host"
    breaks = "Workers and keeper of a group are killed, and the memory of its snapshots is lost: a host dies."
    on = frozenset({"local"})

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group = self.victim(target.run, choose)
        return Injection(
            procs=[*target.run.workers(group), *target.keepers(group)],
            target_group=group,
            segments=own_segments(target.run_dir, target.run.keepers(group)),
        )


class KillLighthouse(Fault):
    name = "kill-lighthouse"
    breaks = "SIGKILL to the lighthouse."

    def why_not(self, run: View) -> str | None:
        return None if run.lighthouse else "there is no lighthouse now"

    def plan(self, target: Target, choose: random.Random) -> Injection:
        return Injection(procs=[target.run.lighthouse] if target.run.lighthouse else [])


def kill_workers(target: Target, groups: list[int]) -> Injection:
    """All workers of these groups at once."""
    workers = [worker for group in groups for worker in target.run.workers(group)]
    return Injection(procs=workers, target_group=groups if len(groups) > 1 else groups[0])


def own_segments(run_dir: Path, places: Iterable[Place]) -> list[Segment]:
    """The segments of this run's keepers. A path that a keeper's file names is believed only if it is the one that
    follows from the run's token, a folder, and this user's."""
    found = []
    for place in places:
        path, run = Path(place.segment), run_id(read_token(run_dir))
        segment = Segment(path.parent, run, place.group, path)
        with contextlib.suppress(OSError):
            own = path.name in (f"everstep-{run}", f"everstep-{run}-group-{place.group}")
            if own and is_own_directory(path):
                found.append(segment)
    return found


FAULTS: dict[str, type[Fault]] = {
    kind.name: kind
    for kind in (
        KillWorker,
        KillGroup,
        KillAll,
        KillHost,
        KillKeeper,
        KillLighthouse,
        StopWorker,
    )
}


def find(names: Iterable[str]) -> list[type[Fault]]:
    """The kinds of these names. Raises LaunchError with the nearest name for one that is unknown."""
    found = []
    for name in names:
        if name not in FAULTS:
            near = difflib.get_close_matches(name, FAULTS, 1, cutoff=0.0)[0]
            raise LaunchError(f"there is no fault {name}, did you mean {near}? All: {', '.join(sorted(FAULTS))}.")
        found.append(FAULTS[name])
    return found
