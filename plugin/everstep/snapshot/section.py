"""`[snapshot]` of a config."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """`[snapshot]`: the state of committed steps in host memory, kept by processes that outlive the
    trainer."""

    enable: bool = False
    """Take snapshots, and resume from them when every group of the run has died."""

    interval: int = 1
    """Committed steps between snapshots."""

    parity: Literal[0, 1, 2] = 1
    """How many keepers (hosts) of a parity group may be lost with their memory at once. 1: XOR; 2: Reed-Solomon.
    Limited to the members of a parity group less one."""

    parity_group: int = 8
    """Groups whose parts are coded together, about: what coding costs depends on this and not on the number of groups.
    With n in a parity group, parity costs a parity / (n - parity)-th part of two buffers' memory."""

    coding_share: float = 0.01
    """The most of a keeper's time that goes into verifying and coding one rank's snapshots. Those in between are kept
    as they are: they survive the death of all trainers, not that of their host. 1: every snapshot is coded."""

    scope: Literal["sharded", "full"] = "sharded"
    """`sharded`: of G groups each copies its 1/G of the state. `full`: each copies all of it; costs G times
    the memory, and any one keeper is enough to restore."""

    segment_dir: str = "/dev/shm"
    """A tmpfs directory for the snapshots. Docker's /dev/shm has 64 MB unless --shm-size says otherwise."""

    memory_reserve_gb: float = 1.0
    """Host memory to leave free. A snapshot that would need it is not taken; an event says how much was
    needed and found."""

    bandwidth_gb_s: float = 4.0
    """The most memory traffic of a rank's copying, reads and writes counted; 0 for no limit. Its checksums need a third
    of that again in time, not in traffic."""

    keeper_ttl_s: float = 1800.0
    """A keeper ends, and gives its memory back, when no agent, trainer or peer has spoken to it for this
    long."""

    transfer_timeout_s: float = 10.0
    """The longest silence of another keeper that is borne while parity is coded or a state restored."""

    restore_wait_s: float = 10.0
    """How long a starting run waits for keepers that do not answer: they may be starting as well."""

    coding_timeout_s: float = 10.0
    """The longest wait for the other keepers to have verified a step before its parity is given up. While a
    step's parity is under way, later steps are not copied over the last step that has one."""

    @property
    def buffers(self) -> int:
        """Snapshots of a rank that there is room for: the newest that is coded, the one being written, and the newest
        that all groups have where that may be another."""
        return 2 if self.coding_share == 1 else 3

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError("snapshot.interval must be at least 1 step")
        if self.parity not in (0, 1, 2):
            raise ValueError("snapshot.parity must be 0, 1 or 2")
        if not 2 <= self.parity_group <= 128:
            raise ValueError("snapshot.parity_group must be 2 to 128 groups")
        if not 0 < self.coding_share <= 1:
            raise ValueError("snapshot.coding_share must be above 0 and at most 1")
