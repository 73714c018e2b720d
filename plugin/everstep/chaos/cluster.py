"""A run on Slurm: its processes are signalled on their own node, by an overlapping step."""

import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from signal import Signals

from everstep.chaos.signals import output, send_on
from everstep.chaos.target import LocalTarget, Target
from everstep.chaos.view import Proc, View
from everstep.launch.slurm import job_file, require_slurm, states_of
from everstep.run.directory import LaunchError, over_file, stop_file
from everstep.run.files import read_json
from everstep.run.token import require_run

LOOK_EVERY_S = 3.0


class SlurmTarget(Target):
    """A run of `everstep submit`. Only jobs that RUN_DIR/state/slurm.json names are touched. Nodes are left alone: a
    fault of a node is a fault of whoever else uses it."""

    kind = "slurm"

    def __init__(self, view: View):
        """Raises LaunchError where there is no Slurm."""
        super().__init__(view)
        require_slurm()
        self._jobs = read_json(job_file(view.run_dir))
        self._alive, self._looked = False, float("-inf")

    def alive(self) -> bool:
        if time.monotonic() - self._looked > LOOK_EVERY_S:
            try:
                self._alive = bool(states_of(self._jobs["groups"]))
            except LaunchError:
                return self._alive  # a controller that is too busy to answer is no reason to stop
            finally:
                self._looked = time.monotonic()
        return self._alive and not self._over()

    def _over(self) -> bool:
        ended = (over_file(self.run_dir, group).exists() for group in range(self.run.groups))
        return stop_file(self.run_dir).exists() or all(ended)

    def signal(self, procs: Iterable[Proc], signum: Signals) -> list[int]:
        reached = []
        for job, some in groupby(sorted(procs, key=self._job_of), key=self._job_of):
            members = list(some)
            reached += send_on(job, members[0].node, [(proc.pid, proc.since) for proc in members], signum)
        return reached

    def _job_of(self, proc: Proc) -> int:
        """The job that a process belongs to. Raises LaunchError when it is not running."""
        if proc.role == "lighthouse":
            return int(self._jobs["lighthouse"])
        listed = output(["squeue", "--noheader", "--array", f"--jobs={self._jobs['groups']}", "--format=%K|%A"])
        ids = dict(line.strip().split("|") for line in listed.splitlines())
        if str(proc.group) not in ids:
            raise LaunchError(f"Slurm runs no job of group {proc.group}.")
        return int(ids[str(proc.group)])


def find_target(run_dir: Path) -> Target:
    """The run in `run_dir`, wherever it runs. Raises LaunchError: no run is there, it is over, or it was submitted to a
    Slurm that cannot be reached from here; UnsafeError, as `require_run`."""
    run_dir = Path(run_dir).resolve()
    require_run(run_dir)
    if not (run_dir / "config.toml").is_file():
        raise LaunchError(f"the run in {run_dir} has not begun yet: wait for its first step.")
    submitted = "groups" in read_json(job_file(run_dir))
    view = View(run_dir, one_host=not submitted)
    target: Target = SlurmTarget(view) if submitted else LocalTarget(view)
    view.catch_up()
    if not target.alive():
        ended = view.ended
        why = f"{ended['status']}, {ended['reason']}" if ended else "none of its jobs or its supervisor is left"
        raise LaunchError(f"the run in {run_dir} is over: {why}.")
    return target
