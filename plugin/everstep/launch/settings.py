"""What a launcher is told about one group."""

from dataclasses import dataclass, field
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.run.directory import config_file
from everstep.run.fence import Claim


@dataclass(frozen=True)
class GroupSettings:
    """One group, or its part on one of its nodes. Times in seconds."""

    run_dir: Path
    group: int
    ranks: int
    """On this node."""
    ranks_here: int = 0
    """Ranks on this machine that share its cores; 0: this group's."""
    host: str = "127.0.0.1"
    """Address that the group's servers listen on."""
    devices: str | None = None
    """GPUs that the workers see, as in `devices.VISIBLE`; None: as inherited."""
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    """The run's section. Without fault tolerance workers neither beat nor tell of commits: no watchdog watches,
    and one that ran for longer than startup_timeout_s counts as one that trained."""
    entry: str = "everstep.train:main"
    """`module:function` that a worker calls with its argv."""
    job: int = 0
    """The batch system's job, if there is one."""
    restart: int = 0
    """How often the batch system has restarted that job."""
    nodes: int = 1
    """Nodes of this group."""
    node_rank: int = 0
    node: str = ""
    """This node's name in the batch system, if there are others to go to."""

    @property
    def claim(self) -> Claim:
        """Which start of the group this is."""
        return Claim(self.job, self.restart)

    @property
    def worker_argv(self) -> list[str]:
        """What a worker of this group is started with: the settled config, and its place in the run."""
        return [
            "--module", "everstep", "--config", str(config_file(self.run_dir)), "--dump_folder", str(self.run_dir),
            "--fault_tolerance.group_id", str(self.group), "--fault_tolerance.bind_host", self.host,
        ]  # fmt: skip
