"""Which start of a group is the one that counts.

A batch system may start a group again while the earlier start still runs: its node was taken for dead and is not. The
start with the higher claim (job, restart) wins. It waits until the earlier one's agent has ended, as its last beat
says, or has been silent for LEASE_S. The earlier one, as soon as it can do anything again, sees that it lost and ends:
its agent looks twice a second, its workers before they ask for a quorum.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.run.beats import DONE, age_s, agent_beat_path, read_beat
from everstep.run.files import hold_alone, locked, read_typed, write_json

LEASE_S = 10.0
"""An agent that has not beaten for this long can be taken for gone: should it wake up, it looks at the fence first."""

POLL_S = 0.2
ENVIRONMENT = "EVERSTEP_FENCE"


class Fenced(Exception):
    """Another start of this group has a higher claim."""


@dataclass(frozen=True, order=True)
class Claim:
    """A start of a group. Later ones compare greater."""

    job: int = 0
    """The batch system's job id; 0 without one."""
    restart: int = 0
    """How often the batch system has restarted that job."""

    def __str__(self) -> str:
        return f"{self.job}.{self.restart}"

    @classmethod
    def parse(cls, text: str) -> "Claim":
        job, _, restart = text.partition(".")
        return cls(int(job), int(restart))


@dataclass(frozen=True)
class _Fence:
    """What the file holds: the claim that counts, and whose it is."""

    claim: Claim
    host: str
    pid: int


def fence_file(run_dir: Path, group: int) -> Path:
    return Path(run_dir) / "state" / f"group-{group}.fence.json"


def holder(run_dir: Path, group: int) -> Claim | None:
    """The claim that counts; None while there is none."""
    found = read_typed(_Fence, fence_file(run_dir, group))
    return found.claim if found else None


def holds(run_dir: Path, group: int, claim: Claim) -> bool:
    """Whether nobody has a higher claim."""
    other = holder(run_dir, group)
    return other is None or other <= claim


def claim_group(run_dir: Path, group: int, claim: Claim, stopping: Callable[[], bool]) -> None:
    """Make `claim` the one that counts, for as long as this process lives, and wait until the start before has ended.

    Raises:
        Fenced: there is a higher one, or the same and its process lives.
    """
    path = fence_file(run_dir, group)
    with locked(path):
        before = read_typed(_Fence, path)
        if before and before.claim > claim:
            raise Fenced(
                f"group {group} was started again as {before.claim} on {before.host}; if that start is over for good, "
                f"on another cluster say, remove {path}"
            )
        alone = hold_alone(path.with_suffix(".alive"))
        if not alone and before and before.claim == claim:
            raise Fenced(
                f"group {group} is run by process {before.pid} on {before.host} already; to start it here in its "
                f"place, give a higher --restart than {claim.restart}"
            )
        write_json(path, asdict(_Fence(claim, socket.gethostname(), os.getpid())))
    while before and before.claim != claim and not stopping() and not _is_gone(run_dir, group):
        time.sleep(POLL_S)
    if not alone:  # the one before had it
        hold_alone(path.with_suffix(".alive"))


def _is_gone(run_dir: Path, group: int) -> bool:
    """Whether the group's agent has said that it ends, or has not beaten within the lease, or never."""
    path = agent_beat_path(run_dir, group)
    beat, age = read_beat(path), age_s(path)
    return age is None or age > LEASE_S or (beat is not None and beat.phase == DONE)
