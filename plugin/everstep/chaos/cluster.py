"""A run on Slurm: its steps are signalled with scancel, single processes on their own node, by an overlapping step."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from signal import SIGCONT, Signals
from typing import Annotated, Any

from everstep.chaos.target import Target
from everstep.chaos.undo import Known, Undo
from everstep.chaos.view import Proc, View
from everstep.launch.slurm import job_file, require_slurm, states_of
from everstep.run import typed
from everstep.run.directory import LaunchError, over_file, stop_file
from everstep.run.files import read_json

TIMEOUT_S = 60.0
LOOK_EVERY_S = 3.0


@dataclass(frozen=True)
class _Order:
    """A signal to processes of one job on one node, "" for a job of one node."""

    job: Annotated[int, typed.Within(1, 1 << 40)]
    node: str
    procs: list[Known]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{0,255}", self.node) or self.node.startswith("-"):
            raise ValueError(f"{self.node!r} is no node")


@dataclass(frozen=True)
class _Orders:
    orders: list[_Order]


def _command(order: _Order, signum: int) -> list[str]:
    """The command that carries an order out."""
    what = typed.dumps({"procs": order.procs, "signum": int(signum)}).decode()
    where = [f"--nodelist={order.node}"] if order.node else []
    # As one task of one node beside what runs there; it takes no resources of its own.
    srun = ["srun", f"--jobid={order.job}", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", *where]
    return [*srun, sys.executable, "-m", "everstep.chaos.signals", what]


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
        for order in self._orders(procs):
            said = run(_command(order, signum)).strip().splitlines()
            reached += typed.parse(list[int], typed.loads(said[-1] if said else "[]"))
        return reached

    def go_on_later(self, procs: Iterable[Proc]) -> Undo:
        return Undo("continue-on-nodes", {"orders": [asdict(order) for order in self._orders(procs)]})

    def kill_agent(self, group: int) -> None:
        run(["scancel", "--signal=KILL", f"{self._jobs['groups']}_{group}.0"])

    def _orders(self, procs: Iterable[Proc]) -> list["_Order"]:
        """One order for each job that has some of these processes."""
        orders = []
        for job, some in groupby(sorted(procs, key=self._job_of), key=self._job_of):
            members = list(some)
            orders.append(_Order(job, members[0].node, [(proc.pid, proc.since) for proc in members]))
        return orders

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


def undo(args: dict[str, Any]) -> None:
    """SIGCONT to the processes that were stopped, on their nodes."""
    for order in typed.parse(_Orders, args).orders:
        run(_command(order, SIGCONT))
