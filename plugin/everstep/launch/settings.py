"""The settings with which a launcher runs one group."""

from dataclasses import dataclass, field
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.run.directory import config_file
from everstep.run.fence import Claim


@dataclass(frozen=True)
class GroupSettings:
    """Settings of one group, or of its part on one of its nodes."""

    run_dir: Path
    group: int
    ranks: int
    """Number of the group's ranks on this node."""
    ranks_here: int = 0
    """Number of ranks on this machine that share its cores; 0: only this group's."""
    host: str = "127.0.0.1"
    """Address that the group's servers listen on."""
    devices: str | None = None
    """GPUs that the workers see, as in `machine.VISIBLE`; None: as inherited."""
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    """The run's section. If `enable` is false, workers beat only at their start and end, and report no commits: stalls
    are not looked for, and workers that ran for `startup_timeout_s` count as having committed a step."""
    job: int = 0
    """The batch system's job id; 0 without a batch system."""
    restart: int = 0
    """Number of times the batch system has restarted that job."""
    nodes: int = 1
    """Number of nodes of this group."""
    node_rank: int = 0
    node: str = ""
    """This node's name in the batch system; "" if the group cannot move to another node."""

    @property
    def claim(self) -> Claim:
        """The claim of this start of the group (`everstep.run.fence`)."""
        return Claim(self.job, self.restart)

    @property
    def worker_argv(self) -> list[str]:
        """The argv of a worker: the resolved config, the run directory, the group, and the address to bind to."""
        return [
            "--module", "everstep", "--config", str(config_file(self.run_dir)), "--dump_folder", str(self.run_dir),
            "--fault_tolerance.group_id", str(self.group), "--fault_tolerance.bind_host", self.host,
        ]  # fmt: skip
