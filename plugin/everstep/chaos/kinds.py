"""All kinds of faults, by name."""

import contextlib
import difflib
import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals

from everstep.chaos.fault import Fault, Injection
from everstep.chaos.target import Target
from everstep.chaos.view import View
from everstep.run.directory import LaunchError
from everstep.run.files import is_own_directory
from everstep.run.token import read_token
from everstep.snapshot.peers import KeeperRecord
from everstep.snapshot.segment import Segment, run_id

OF_SOME = frozenset(("group", "rank", "count", "duration_s"))
"""Fields of a fault that only some kinds have."""


@dataclass(frozen=True)
class Kind:
    """A way to break a run. A kind whose name begins with `kill` counts as a kill: it ends processes that the group
    then has to start again."""

    breaks: str
    """What it does to the run, in one sentence."""
    plan: Callable[[Fault, Target, random.Random], Injection]
    """Decides which processes to hit, and changes nothing. It draws from its last argument only, so that a seed repeats
    it. Called only while `why_not` returns None."""
    why_not: Callable[[Fault, View], str | None] = Fault.why_no_group
    """Returns why it cannot be done to the run now, or None. Default: why no group may be hit."""
    never: Callable[[Fault, View], str | None] = lambda fault, run: None
    """Returns why the run's settings never allow it, or None if it can be done at times."""
    on: frozenset[str] = frozenset({"local", "slurm"})
    """Values of `Target.kind` that it can be done to."""
    has: frozenset[str] = frozenset({"group"})
    """The fields of OF_SOME that it has."""


def _hit_worker(fault: Fault, target: Target, choose: random.Random, *, signum: Signals) -> Injection:
    group = fault.victim(target.run, choose)
    workers = target.run.workers(group)
    worker = choose.choice(workers) if fault.rank is None else workers[fault.rank]
    lasts_s = fault.duration_s if signum == SIGSTOP else 0.0
    told = {"target_rank": worker.rank}
    return Injection(procs=[worker], signum=signum, groups=[group], fields=told, lasts_s=lasts_s)


def _why_no_worker(fault: Fault, run: View) -> str | None:
    groups = run.candidates() if fault.group is None else [fault.group]
    if fault.rank is not None and any(fault.rank >= len(run.workers(group)) for group in groups):
        return f"group {groups[0]} has no rank {fault.rank}"
    return fault.why_no_group(run)


def _kill_groups(fault: Fault, target: Target, choose: random.Random) -> Injection:
    if fault.count == 1:
        return _kill_workers(target, [fault.victim(target.run, choose)])
    return _kill_workers(target, sorted(choose.sample(target.run.candidates(fault.count), fault.count)))


def _never_groups(fault: Fault, run: View) -> str | None:
    return None if fault.count in (1, *range(run.groups)) else f"it has {run.groups} groups, and one of them must stay"


def _kill_all(fault: Fault, target: Target, choose: random.Random) -> Injection:
    return _kill_workers(target, [group for group in target.run.group_ids if target.run.workers(group)])


def _with_keeper(fault: Fault, run: View) -> list[int]:
    mine = run.group_ids if fault.group is None else [fault.group]
    return [group for group in mine if run.keepers(group)]


def _kill_keeper(fault: Fault, target: Target, choose: random.Random) -> Injection:
    group = choose.choice(_with_keeper(fault, target.run))
    # The group itself is not hit: it goes on taking part.
    return Injection(procs=target.keepers(group), fields={"keeper_of": group})


def _kill_host(fault: Fault, target: Target, choose: random.Random) -> Injection:
    group = fault.victim(target.run, choose)
    procs = [*target.run.workers(group), *target.keepers(group)]
    segments = own_segments(target.run_dir, target.run.keepers(group))
    return Injection(procs=procs, groups=[group], segments=segments)


def _kill_lighthouse(fault: Fault, target: Target, choose: random.Random) -> Injection:
    return Injection(procs=[target.run.lighthouse] if target.run.lighthouse else [])


def _kill_workers(target: Target, groups: list[int]) -> Injection:
    return Injection(procs=[worker for group in groups for worker in target.run.workers(group)], groups=groups)


def own_segments(run_dir: Path, places: Iterable[KeeperRecord]) -> list[Segment]:
    """Return the segments of this run's keepers. The path in a keeper's file is used only if its name is the one that
    follows from the run's token, and if it is a folder of this user."""
    found = []
    for place in places:
        path, run = Path(place.segment), run_id(read_token(run_dir))
        with contextlib.suppress(OSError):
            own = path.name in (f"everstep-{run}", f"everstep-{run}-group-{place.group}")
            if own and is_own_directory(path):
                found.append(Segment(run, place.group, path))
    return found


FAULTS = {
    "kill-worker": Kind(
        "SIGKILL to one worker of a group.",
        functools.partial(_hit_worker, signum=SIGKILL),
        _why_no_worker,
        has=frozenset({"group", "rank"}),
    ),
    "kill-group": Kind(
        "SIGKILL to all workers of a group, of several nodes to those of the first, or of `count` groups at once.",
        _kill_groups,
        lambda fault, run: fault.why_no_group(run, fault.count),
        _never_groups,
        has=frozenset({"group", "count"}),
    ),
    "kill-all": Kind(
        "SIGKILL to all workers of all groups at once. No process holds the state any more.",
        _kill_all,
        lambda fault, run: None if run.taking_part else "no group takes part",
        has=frozenset(),
    ),
    "kill-host": Kind(
        "A host dies: workers and keeper of a group are killed, and the memory of its snapshots is removed.",
        _kill_host,
        on=frozenset({"local"}),
    ),
    "kill-keeper": Kind(
        "SIGKILL to the process that holds a group's snapshots. Its shared memory stays.",
        _kill_keeper,
        lambda fault, run: None if _with_keeper(fault, run) else "no keeper runs that may be hit",
    ),
    "kill-lighthouse": Kind(
        "SIGKILL to the lighthouse.",
        _kill_lighthouse,
        lambda fault, run: None if run.lighthouse else "no lighthouse runs now",
        has=frozenset(),
    ),
    "stop-worker": Kind(
        "SIGSTOP to one worker for duration_s seconds, or with 0 for ever, like a hang.",
        functools.partial(_hit_worker, signum=SIGSTOP),
        _why_no_worker,
        has=frozenset({"group", "rank", "duration_s"}),
    ),
}


def require_kinds(names: Iterable[str]) -> None:
    """Raise LaunchError, with the nearest kind, for a name that is no kind."""
    for name in names:
        if name not in FAULTS:
            near = difflib.get_close_matches(name, FAULTS, 1, cutoff=0.0)[0]
            raise LaunchError(f"there is no fault {name}, did you mean {near}? All: {', '.join(sorted(FAULTS))}.")


def why_never(fault: Fault, target: Target) -> str | None:
    """Return why a fault can never be done to the target; None if it can be done at times."""
    kind = FAULTS[fault.name]
    if target.kind not in kind.on:
        return f"{fault.name} cannot be done to a run on {target.kind}, only on {', '.join(sorted(kind.on))}"
    reason = kind.never(fault, target.run)
    return f"{fault.name} cannot be done to {target.run_dir}: {reason}" if reason else None


def why_not(fault: Fault, target: Target) -> str | None:
    """Return why a fault cannot be done to the target now; None if it can."""
    return why_never(fault, target) or FAULTS[fault.name].why_not(fault, target.run)
