"""A run on Slurm. Its processes are signalled on their own node, from an overlapping job step."""

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from everstep.chaos.signals import send_on
from everstep.chaos.target import LocalTarget, Target
from everstep.chaos.view import Proc, View
from everstep.launch.slurm import job_file, states_of
from everstep.run.directory import LaunchError, ends_of_groups, stop_file
from everstep.run.files import read_json
from everstep.run.token import require_run

LOOK_EVERY_S = 3.0


class SlurmTarget(Target):
    """A run of `everstep submit`. Only jobs that RUN_DIR/state/slurm.json names are touched. Nodes are left alone, as a
    fault of a node would hit its other users as well."""

    kind = "slurm"

    def __init__(self, view: View):
        """Raises LaunchError if Slurm cannot be asked."""
        super().__init__(view)
        self._jobs = read_json(job_file(view.run_dir))
        self._alive, self._looked = bool(states_of(self._jobs["groups"])), time.monotonic()

    def alive(self) -> bool:
        if time.monotonic() - self._looked > LOOK_EVERY_S:
            try:
                self._alive = bool(states_of(self._jobs["groups"]))
            except LaunchError:
                return self._alive  # a controller that is too busy to answer is no reason to stop
            finally:
                self._looked = time.monotonic()
        return self._alive and not (stop_file(self.run_dir).exists() or all(ends_of_groups(self.run_dir)))

    def signal(self, procs: Iterable[Proc], signum: int) -> list[int]:
        tasks = {task.group: task.job for task in states_of(self._jobs["groups"])}
        by_job = defaultdict[str, list[Proc]](list)
        for proc in procs:
            job = self._jobs["lighthouse"] if proc.role == "lighthouse" else tasks.get(proc.group)
            if job is None:
                raise LaunchError(f"Slurm runs no job of group {proc.group}.")
            by_job[job].append(proc)
        reached = []
        for job, members in by_job.items():
            reached += send_on(job, members[0].node, [(proc.pid, proc.since) for proc in members], signum)
        return reached


def find_target(run_dir: Path) -> Target:
    """Return the run in `run_dir` as a target, here or on Slurm. Raises LaunchError if there is no run, if it is over,
    or if it was submitted to a Slurm that cannot be reached from here; UnsafeError like `require_run`."""
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
        why = f"{ended['status']}, {ended['reason']}" if ended else "neither its jobs nor its supervisor are running"
        raise LaunchError(f"the run in {run_dir} is over: {why}.")
    return target
