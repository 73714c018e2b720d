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
from dataclasses import asdict, dataclass, field, replace
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
    """A start of a group, whose file it is in while it is the one that counts. Later ones compare greater."""

    job: int
    """The batch system's job id; 0 without one."""
    restart: int
    """How often the batch system has restarted that job."""
    host: str = field(default="", compare=False)
    pid: int = field(default=0, compare=False)
    """Who made it count, and where."""

    def __str__(self) -> str:
        return f"{self.job}.{self.restart}"

    @classmethod
    def parse(cls, text: str) -> "Claim":
        job, _, restart = text.partition(".")
        return cls(int(job), int(restart))


def fence_file(run_dir: Path, group: int) -> Path:
    return Path(run_dir) / "state" / f"group-{group}.fence.json"


def holder(run_dir: Path, group: int) -> Claim | None:
    """The claim that counts; None while there is none."""
    return read_typed(Claim, fence_file(run_dir, group))


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
        before = read_typed(Claim, path)
        if before and before > claim:
            raise Fenced(
                f"group {group} was started again as {before} on {before.host}; if that start is over for good, "
                f"on another cluster say, remove {path}"
            )
        alone = hold_alone(path.with_suffix(".alive"))
        if not alone and before is not None and before == claim:
            raise Fenced(
                f"group {group} is run by process {before.pid} on {before.host} already; to start it here in its "
                f"place, give a higher --restart than {claim.restart}"
            )
        write_json(path, asdict(replace(claim, host=socket.gethostname(), pid=os.getpid())))
    while before and before != claim and not stopping() and not _is_gone(run_dir, group):
        time.sleep(POLL_S)
    if not alone:  # the one before had it
        hold_alone(path.with_suffix(".alive"))


def _is_gone(run_dir: Path, group: int) -> bool:
    """Whether the group's agent has said that it ends, or has not beaten within the lease, or never."""
    path = agent_beat_path(run_dir, group)
    beat, age = read_beat(path), age_s(path)
    return age is None or age > LEASE_S or (beat is not None and beat.phase == DONE)
