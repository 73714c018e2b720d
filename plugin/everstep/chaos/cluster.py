"""A run on Slurm: its steps are signalled with scancel, single processes on their own node, by an overlapping step."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from signal import Signals

from everstep.chaos.target import Target
from everstep.chaos.undo import Undo
from everstep.chaos.view import Proc, View
from everstep.launch.slurm import job_file, require_slurm, states_of
from everstep.run.directory import LaunchError, over_file, stop_file
from everstep.run.files import read_json

TIMEOUT_S = 60.0
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
        return self._alive

    def over(self) -> bool:
        ended = (over_file(self.run_dir, group).exists() for group in range(self.run.groups))
        return stop_file(self.run_dir).exists() or all(ended)

    def launcher(self) -> Proc | None:
        return None

    def signal(self, procs: Iterable[Proc], signum: Signals) -> list[int]:
        reached: list[int] = []
        for command in self._commands(procs, signum):
            reached += json.loads(run(command).strip().splitlines()[-1])
        return reached

    def later(self, procs: Iterable[Proc], signum: Signals) -> Undo:
        return Undo("everstep.chaos.cluster:run_all", {"commands": self._commands(procs, signum)})

    def kill_agent(self, group: int) -> None:
        run(["scancel", "--signal=KILL", f"{self._jobs['groups']}_{group}.0"])

    def _commands(self, procs: Iterable[Proc], signum: Signals) -> list[list[str]]:
        """One command for each job that has some of these processes."""
        commands = []
        for job, some in groupby(sorted(procs, key=self._job_of), key=self._job_of):
            members = list(some)
            order = {"procs": [[proc.pid, proc.since] for proc in members], "signum": int(signum)}
            where = [f"--nodelist={members[0].node}"] if members[0].node else []
            # As one task of one node beside what runs there; it takes no resources of its own.
            srun = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", *where]
            commands.append([*srun, sys.executable, "-m", "everstep.chaos.signals", json.dumps(order)])
        return commands

    def _job_of(self, proc: Proc) -> int:
        """The job that a process belongs to. Raises LaunchError when it is not running."""
        if proc.role == "lighthouse":
            return int(self._jobs["lighthouse"])
        listed = run(["squeue", "--noheader", "--array", f"--jobs={self._jobs['groups']}", "--format=%K|%A"])
        ids = dict(line.strip().split("|") for line in listed.splitlines())
        if str(proc.group) not in ids:
            raise LaunchError(f"Slurm runs no job of group {proc.group}.")
        return int(ids[str(proc.group)])


def run(command: Sequence[str]) -> str:
    """What a command of Slurm says. Raises LaunchError when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=Path("/"))
    except subprocess.TimeoutExpired:
        raise LaunchError(f"no answer within {TIMEOUT_S:g} s: {shlex.join(command)}") from None
    if done.returncode:
        raise LaunchError(f"{done.stderr.strip() or done.stdout.strip()}\n  {shlex.join(command)}")
    return done.stdout


def run_all(commands: Sequence[Sequence[str]]) -> None:
    """The undo of a fault on Slurm."""
    for command in commands:
        run(command)
