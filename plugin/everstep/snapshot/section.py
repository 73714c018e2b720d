"""The section `[snapshot]` of a config."""

import math
import os.path
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(kw_only=True, slots=True)
class SnapshotSection:
    """`[snapshot]`: states of committed steps are kept in host memory, by processes that outlive the trainers."""

    enable: bool = False
    """Whether to take snapshots, and to resume from them after every group of the run has died."""

    interval: int = 5
    """Committed steps between snapshots. If all trainers die, at most this many steps and those made during one coding
    are lost."""

    parity: Literal[0, 1, 2] = 1
    """How many members of a parity group may be lost at once, with their memory. 1: XOR; 2: P + Q, as in RAID-6.
    0: the memory of every host is needed, but all trainers may die."""

    parity_group: int = 8
    """About how many groups are coded together. The cost of coding depends on this and not on the number of groups.
    With n groups in a parity group, parity takes parity / (n - parity) of the memory of two buffers."""

    failure_domain: Literal["host", "group"] = "host"
    """What is lost together. `host`: all groups on a host, which share a keeper. `group`: each group counts as a
    separate host and has its own keeper; for trials on one machine."""

    segment_dir: str = "/dev/shm"
    """Absolute path of a tmpfs directory for the snapshots. Docker's /dev/shm has 64 MB unless --shm-size is given."""

    memory_reserve_gb: float = 1.0
    """Host memory to leave free, in GiB. A snapshot that would need it is not taken; an event says how much was
    needed and found."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError("snapshot.interval must be at least 1 step")
        if not 2 <= self.parity_group <= 128:
            raise ValueError("snapshot.parity_group must be 2 to 128 groups")
        if not os.path.isabs(self.segment_dir):  # a keeper's working directory is not the trainers'
            raise ValueError("snapshot.segment_dir must be an absolute path")
        if not 0 <= self.memory_reserve_gb < math.inf:
            raise ValueError("snapshot.memory_reserve_gb must be at least 0 GiB")


@dataclass(kw_only=True, slots=True)
class Snapshot(SnapshotSection):
    """Settings of keepers and copiers: the section, and timeouts that no config can set."""

    keeper_ttl_s: float = 1800.0
    """Seconds after which a keeper ends and frees its memory if no trainer or command has used it. Reads of its
    buffers do not count."""

    transfer_timeout_s: float = 10.0
    """Longest silence of a keeper, in seconds, while a state is restored."""

    restore_wait_s: float = 10.0
    """Seconds that a starting run waits for keepers that do not answer, since they may be starting as well."""

    coding_timeout_s: float = 10.0
    """Seconds in which a published snapshot must be coded, plus one for each 200 MB of parts that the keeper codes at
    the same time. After that it is given up, and the member that the others waited for is left out of the next
    snapshots for a while."""

    @staticmethod
    def of(section: SnapshotSection) -> "Snapshot":
        """Return the section's settings with the default timeouts."""
        return Snapshot(**{field.name: getattr(section, field.name) for field in fields(SnapshotSection)})
