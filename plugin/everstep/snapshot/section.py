"""`[snapshot]` of a config."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(kw_only=True, slots=True)
class SnapshotSection:
    """`[snapshot]`: the state of committed steps in host memory, kept by processes that outlive the
    trainer."""

    enable: bool = False
    """Take snapshots, and resume from them when every group of the run has died."""

    interval: int = 5
    """Committed steps between snapshots. What is lost with all trainers is at most this and the time of one coding."""

    parity: Literal[0, 1, 2] = 1
    """How many members of a parity group may be lost with their memory at once. 1: XOR; 2: P + Q, as RAID-6.
    0: no host may be lost, but all trainers."""

    parity_group: int = 8
    """Groups whose parts are coded together, about: what coding costs depends on this and not on the number of groups.
    With n in a parity group, parity costs a parity / (n - parity)-th part of two buffers' memory."""

    failure_domain: Literal["host", "group"] = "host"
    """What is lost together. `host`: all groups on a host, which share a keeper. `group`: each group counts as a host
    of its own, with a keeper of its own: for trials on one machine."""

    segment_dir: str = "/dev/shm"
    """A tmpfs directory for the snapshots. Docker's /dev/shm has 64 MB unless --shm-size says otherwise."""

    memory_reserve_gb: float = 1.0
    """Host memory to leave free. A snapshot that would need it is not taken; an event says how much was
    needed and found."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError("snapshot.interval must be at least 1 step")
        if not 2 <= self.parity_group <= 128:
            raise ValueError("snapshot.parity_group must be 2 to 128 groups")


@dataclass(kw_only=True, slots=True)
class Snapshot(SnapshotSection):
    """What keepers and copiers go by: the section, and how long they wait, which no config sets."""

    keeper_ttl_s: float = 1800.0
    """A keeper ends, and gives its memory back, when no agent, trainer or peer has spoken to it for this
    long."""

    transfer_timeout_s: float = 10.0
    """The longest silence of another keeper that is borne while a state is restored."""

    restore_wait_s: float = 10.0
    """How long a starting run waits for keepers that do not answer: they may be starting as well."""

    coding_timeout_s: float = 10.0
    """The longest that a snapshot may take from its publication until it is coded, and a second more for each 200 MB
    of a group's parts. Then it is given up, and the member that the others waited for is left out of the next ones for
    a while."""

    @staticmethod
    def of(section: SnapshotSection) -> "Snapshot":
        """The section's settings with the usual waits."""
        return Snapshot(**{field.name: getattr(section, field.name) for field in fields(SnapshotSection)})
