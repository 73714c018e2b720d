"""Slurm's part of `everstep submit`, `scale`, `status` and `stop`. All scheduling is left to Slurm.

A run is two jobs: an array with one task per replica group, and a small job for the lighthouse. They share only the run
directory, on a file system that all nodes see. RUN_DIR/state/slurm.json names the jobs.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everstep import files
from everstep.run.directory import (
    End,
    LaunchError,
    ask_to_stop,
    config_file,
    ended_file,
    ends_of_groups,
    groups_file,
    holder_of,
    in_use,
    job_file,
    over_file,
    starts_file,
    stop_file,
)
from everstep.run.events import event_path
from everstep.run.fence import groups_held
from everstep.run.files import make_folder, read_json, write_json

SCRIPTS = files.folder("slurm")
FOR_GOOD = ("done", "failed")
"""Statuses of groups that `scale` does not start again. A group that was stopped is started again if it is wanted."""
ENDED_STATES = (
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "COMPLETING",
)  # fmt: skip
"""States in which a task counts as ended. In COMPLETING a task is cleaned up, maybe before it is requeued. If another
one was submitted meanwhile, the fence ends one of the two."""
COMMAND_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Submission:
    """A run to submit. `sbatch_flags` are for the groups' job; torchtitan's flags are in the resolved config."""

    config: Path
    run_dir: Path
    groups: int
    nodes_per_group: int = 1
    ranks_per_node: int = 1
    sbatch_flags: Sequence[str] = field(default_factory=tuple)
    lighthouse_flags: Sequence[str] = field(default_factory=tuple)
    page: bool = False

    def commands(self) -> dict[str, list[str]]:
        """Return the sbatch command of each job, by its name, in the order in which to run them."""
        name, logs = self.config.stem, str(self.run_dir / "logs").replace("%", "%%")  # sbatch replaces %j and others
        # The path of this Everstep is an argument, as the user's flags may keep the environment from the job.
        everstep = str(Path(sys.executable).with_name("everstep"))
        common = [everstep, str(config_file(self.run_dir)), "--run-dir", str(self.run_dir)]
        # Also where `scale` submits more tasks: paths in the config are relative to the folder of the first submit.
        sbatch = ["sbatch", "--parsable", f"--chdir={Path.cwd()}"]
        array = [f"--job-name={name}", f"--array=0-{self.groups - 1}", f"--nodes={self.nodes_per_group}"]
        return {
            "lighthouse": [
                *sbatch, f"--job-name={name}-lighthouse", f"--output={logs}/lighthouse-job.log",
                *self.lighthouse_flags,
                str(SCRIPTS / "lighthouse.sbatch"), *common, *["--page"] * self.page,
            ],
            "groups": [
                *sbatch, *array, "--ntasks-per-node=1", f"--output={logs}/group-%a/job.log",
                *self.sbatch_flags,
                str(SCRIPTS / "train.sbatch"), *common, "--ranks", str(self.ranks_per_node),
            ],
        }  # fmt: skip


def jobs_of(run_dir: Path) -> dict[str, Any]:
    """Return the ids of a run's jobs by name; `groups` may be several ids, separated by commas. Raises LaunchError if
    its groups were not submitted."""
    jobs = read_json(job_file(run_dir))
    if not isinstance(jobs.get("groups"), str):
        raise LaunchError(f"{run_dir} was not submitted to Slurm: {job_file(run_dir)} names no job of its groups.")
    return jobs


def alive_jobs(run_dir: Path) -> dict[str, str]:
    """Return the ids of the run's queued or running jobs by name. Raises LaunchError if both jobs are, or if an
    `everstep run` has the directory: the jobs' claims would end its groups."""
    if holder_of(run_dir) is not None:
        raise in_use(run_dir)
    known = read_json(job_file(run_dir))
    alive = {name: job for name, job in known.items() if name in ("lighthouse", "groups") and states_of(job)}
    if len(alive) == 2:
        raise LaunchError(
            f"{run_dir} is submitted already: jobs {alive['groups']} (groups) and {alive['lighthouse']} (lighthouse). "
            f"Watch it with `everstep status {run_dir}`, end it with `everstep stop {run_dir}`."
        )
    return alive


def submit(submission: Submission) -> dict[str, str]:
    """Submit the run's jobs and return their ids by name. Groups that are queued or running already stay as they are. A
    lighthouse without them is replaced: it may be the one of an earlier start, which ends a while after its groups.

    Raises:
        LaunchError: Slurm refuses, or both jobs are queued or running already.
    """
    run_dir, alive = submission.run_dir, alive_jobs(submission.run_dir)
    if "groups" not in alive and "lighthouse" in alive:
        call(["scancel", "--quiet", alive.pop("lighthouse")])
    stop_file(run_dir).unlink(missing_ok=True)
    ended_file(run_dir).unlink(missing_ok=True)
    for group in range(submission.groups):
        make_folder(run_dir / "logs" / f"group-{group}")
        if "groups" not in alive:
            over_file(run_dir, group).unlink(missing_ok=True)
            starts_file(run_dir, group).unlink(missing_ok=True)
    if "groups" not in alive:
        groups_file(run_dir).unlink(missing_ok=True)
    starts_file(run_dir, None).unlink(missing_ok=True)
    jobs, commands = dict(alive), submission.commands()
    for name, command in commands.items():
        if name not in alive:
            try:
                jobs[name] = _sbatch(command)
            except LaunchError:
                if name == "groups" and "lighthouse" not in alive:  # it would wait for groups that never come
                    with contextlib.suppress(LaunchError):
                        call(["scancel", "--quiet", jobs["lighthouse"]])
                raise
            write_json(job_file(run_dir), read_json(job_file(run_dir)) | jobs | {"sbatch": commands["groups"]})
    return jobs


def scale(run_dir: Path, groups: int) -> str:
    """Have Slurm run the tasks of `groups` groups, and return what was done: submit missing tasks by the command of the
    first ones, and cancel surplus tasks that are pending. Surplus groups that run see `groups_file` and end."""
    jobs = jobs_of(run_dir)
    tasks = states_of(jobs["groups"])
    there = {task.group for task in tasks}
    over = enumerate(ends_of_groups(run_dir))
    ended = {group for group, end in over if end is not None and end.status in FOR_GOOD}
    missing = [group for group in range(groups) if group not in there | ended]
    spare = [task.name for task in tasks if task.state == "PENDING" and (task.group or 0) >= groups]
    said = []
    if missing:
        for group in missing:
            make_folder(run_dir / "logs" / f"group-{group}")
            over_file(run_dir, group).unlink(missing_ok=True)
        array = f"--array={','.join(map(str, missing))}"
        job = _sbatch([array if word.startswith("--array=") else word for word in jobs["sbatch"]])
        write_json(job_file(run_dir), jobs | {"groups": f"{jobs['groups']},{job}"})
        said.append(f"submitted groups {', '.join(map(str, missing))} as job {job}")
    if spare:
        call(["scancel", *spare])
        said.append(f"cancelled the pending tasks {', '.join(spare)}")
    return "; ".join(said)


def has_ended(run_dir: Path) -> bool:
    """Return whether a run has ended. A submitted run has if all its groups ended for good, an `everstep run` if no
    launcher holds its directory and no process a group. False if only agents ever ran in it, as they may come later."""
    if holder_of(run_dir) is not None or groups_held(run_dir):
        return False
    if job_file(run_dir).exists():
        return all(ends_of_groups(run_dir))
    return event_path(run_dir, None, None, "supervisor").exists()


def stop(run_dir: Path) -> str:
    """Ask for a clean stop, and return what was done. Every group finishes its step, and one writes the last
    checkpoint. Pending tasks are cancelled."""
    if has_ended(run_dir):
        return f"nothing runs in {run_dir}: the run has ended"
    ask_to_stop(run_dir)
    said = [f"asked every group of {run_dir} to finish its step and to stop"]
    job = read_json(job_file(run_dir)).get("groups")
    try:
        pending = [task.group for task in states_of(job) if task.state == "PENDING"] if job else []
        if job and pending:
            call(["scancel", "--state=PENDING", *job.split(",")])
            said.append("cancelled the tasks that were pending")
        for group in pending:
            if group is not None:  # no agent will say how it ended
                write_json(over_file(run_dir, group), asdict(End("stopped", "cancelled while it was pending")))
    except LaunchError as error:
        said.append(f"pending tasks were not cancelled: {error}")
    return "; ".join(said)


@dataclass(frozen=True)
class Task:
    """A task of an array job, as squeue shows it."""

    name: str
    """`JOB_INDEX`, for scancel."""
    group: int | None
    job: str
    """The task's own job id, once it runs."""
    state: str
    nodes: str
    reason: str


def states_of(job: str) -> list[Task]:
    """Return the tasks that have not ended, of one job or of several ids separated by commas. A pending range of an
    array gives one task for each index. Raises LaunchError."""
    try:
        listed = call(["squeue", "--noheader", "--array", f"--jobs={job}", "--format=%F|%K|%A|%T|%N|%r"])
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    tasks = []
    for line in listed.splitlines():
        array, index, own, state, nodes, reason = line.split("|", 5)
        if state not in ENDED_STATES:
            group = int(index) if index.isdigit() else None
            tasks.append(Task(f"{array}_{index}", group, own, state, nodes, reason))
    return tasks


def _sbatch(command: Sequence[str]) -> str:
    """Submit a job and return its id. Raises LaunchError."""
    return call(command).strip().partition(";")[0]


def require_program(program: str) -> None:
    """Raise LaunchError if there is no such program here."""
    if shutil.which(program) is None:
        raise LaunchError(f"there is no {program} here: run this on a login node of a Slurm cluster.")


def call(command: Sequence[str]) -> str:
    """Run a command of Slurm and return its output. Raises LaunchError if it fails or there is no Slurm here."""
    require_program(command[0])
    try:
        # SQUEUE_STATES or SQUEUE_PARTITION of the user's own views would hide jobs.
        env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"no answer within {COMMAND_TIMEOUT_S:g} s: {shlex.join(command)}") from None
    if done.returncode:
        raise LaunchError(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}\n  {shlex.join(command)}")
    return done.stdout


def allocation(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the fields of `GroupSettings` that Slurm's environment variables tell this task of the groups' job; {}
    outside of an array job."""
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return {}
    return {
        "group": int(environment["SLURM_ARRAY_TASK_ID"]),
        "job": int(environment["SLURM_ARRAY_JOB_ID"]),
        "restart": int(environment.get("SLURM_RESTART_COUNT") or 0),
        "nodes": int(environment.get("SLURM_NNODES", "1")),
        "node_rank": int(environment.get("SLURM_NODEID", "0")),
        "node": environment.get("SLURMD_NODENAME", ""),
    }
