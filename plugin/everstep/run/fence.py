"""The fence of a group: of two starts of the group at the same time, only the later one may run.

A batch system may start a group again while the earlier start still runs, for instance on a node that was wrongly taken
for dead. The start with the higher claim (job, restart) wins. It waits until the earlier start's agent has ended (its
last beat says so) or has been silent for LEASE_S. As soon as the earlier start can run again, it sees that it has lost
and ends: its agent looks twice a second, its workers look before they ask for a quorum.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from everstep.run.beats import DONE, age_s, agent_beat_path, read_beat
from everstep.run.files import lock_for_life, lock_holder, locked, read_typed, write_json

LEASE_S = 10.0
"""Seconds without a beat after which an agent counts as gone. If it wakes up later, it looks at the fence first."""
POLL_S = 0.2
CLAIMED, TRAINED = "group-*.[0-9]*.[0-9]*.alive", "group-*.rank-0.alive"
ENVIRONMENT = "EVERSTEP_FENCE"
"""Environment variable: the claim of a worker's start of its group, as text."""


class Fenced(Exception):
    """Another start of this group has a higher claim, or a live process has this one."""


@dataclass(frozen=True, order=True)
class Claim:
    """The identity of one start of a group; later starts compare greater. The fence file holds the one that counts."""

    job: int
    """The batch system's job id; 0 without one."""
    restart: int
    """Number of times the batch system has restarted that job."""
    host: str = field(default="", compare=False)
    pid: int = field(default=0, compare=False)
    """Host and pid of the process that wrote the claim to the fence file."""

    def __str__(self) -> str:
        return f"{self.job}.{self.restart}"

    @classmethod
    def parse(cls, text: str) -> "Claim":
        """The inverse of `str`. Raises ValueError."""
        job, _, restart = text.partition(".")
        return cls(int(job), int(restart))


def fence_file(run_dir: Path, group: int) -> Path:
    """Return the file that holds the highest claim to a group so far."""
    return Path(run_dir) / "state" / f"group-{group}.fence.json"


def rank_lock(run_dir: Path, group: int, rank: int) -> Path:
    """Return the file that the process of a rank holds by `lock_for_life`, whatever started it."""
    return Path(run_dir) / "state" / f"group-{group}.rank-{rank}.alive"


def groups_held(run_dir: Path, *locks: str) -> list[str]:
    """Return the groups ("group-0") of which another live process holds one of these `locks`, on any machine: an agent
    a lock of CLAIMED, rank 0 that of TRAINED. Default: both, as no agent holds a group that torchrun started."""
    found = (lock for kind in locks or (CLAIMED, TRAINED) for lock in (Path(run_dir) / "state").glob(kind))
    return sorted({lock.name.partition(".")[0] for lock in found if lock_holder(lock) is not None})


def holds(run_dir: Path, group: int, claim: Claim) -> bool:
    """Return whether no other start of the group has a higher claim. True if the fence file cannot be read now."""
    return (other := read_typed(Claim, fence_file(run_dir, group))) is None or other <= claim


def claim_group(run_dir: Path, group: int, claim: Claim, stopping: Callable[[], bool]) -> None:
    """Write `claim` to the group's fence file, hold it for as long as this process lives, and wait until the earlier
    start is gone or `stopping()` is true. Until then this start must not beat, as both write to the same file.

    Raises:
        Fenced: the file has a higher claim, or the same claim of another process that lives.
    """
    path = fence_file(run_dir, group)
    with locked(path):
        before = read_typed(Claim, path)
        if before and before > claim:
            raise Fenced(
                f"group {group} was started again as {before} on {before.host}; if that start has ended for good, "
                f"for instance on another cluster, remove {path}"
            )
        if not lock_for_life(path.with_name(f"group-{group}.{claim}.alive")):
            by = f"process {before.pid} on {before.host}" if before else "another process"
            raise Fenced(
                f"group {group} is run by {by} already; to replace that one, start it here with --restart "
                f"{claim.restart + 1} or higher"
            )
        write_json(path, asdict(replace(claim, host=socket.gethostname(), pid=os.getpid())))
    while before and before != claim and not stopping() and not _is_gone(run_dir, group):
        time.sleep(POLL_S)


def _is_gone(run_dir: Path, group: int) -> bool:
    """Return whether the group's agent has never beaten, has been silent for LEASE_S, or has ended (beat DONE)."""
    path = agent_beat_path(run_dir, group)
    with contextlib.suppress(OSError):  # it cannot be read now
        beat, age = read_beat(path), age_s(path)
        return age is None or age > LEASE_S or (beat is not None and beat.phase == DONE)
    return False
