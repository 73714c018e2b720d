"""Sends signals to processes of a run and to no others: a pid comes with the time at which the run announced it.

    python -m everstep.chaos.signals '[[[PID, SINCE], …], SIGNUM]'

does on a node of a cluster what `send` does on this machine.
"""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import psutil
from pydantic import Field

from everstep.launch.slurm import call
from everstep.run import typed
from everstep.run.directory import LaunchError

SLACK_S = 1.0
"""Seconds by which a process may seem younger than its announcement: the kernel counts start times in jiffies."""

Known = tuple[Annotated[int, Field(ge=2, le=1 << 31)], float]
"""A pid, and the wall time at which the run announced it. The bounds exclude init, and the numbers below 1 that stand
for many processes."""
Order = tuple[list[Known], Annotated[int, Field(ge=0, le=64)]]
"""The argument of `main`: processes, and the number of the signal."""


def is_same(pid: int, since: float) -> bool:
    """Whether the process with this pid lives and is the one announced at `since`, not one that began later."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since + SLACK_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(procs: Sequence[Known], signum: int) -> list[int]:
    """Send a signal, or 0, to those processes of this machine that are still the announced ones. Return their pids."""
    reached = []
    for pid, since in procs:
        # The descriptor stays with this process, even if the pid is used again.
        with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid), "rb", buffering=0) as process:
            if is_same(pid, since):
                signal.pidfd_send_signal(process.fileno(), signum)
                reached.append(pid)
    return reached


def send_on(job: str, node: str, procs: Sequence[Known], signum: int) -> list[int]:
    """Do the same on a node of a Slurm job; `node` is "" if the job has one. Raises LaunchError if Slurm refuses, or if
    an argument is no process or node."""
    try:
        order = typed.dumps(typed.parse(Order, [list(procs), int(signum)])).decode()
    except typed.UnfitError as error:
        raise LaunchError(f"these are no processes of a run: {error}") from None
    if not re.fullmatch(r"([A-Za-z0-9._][A-Za-z0-9._-]{0,254})?", node):
        raise LaunchError(f"{node!r} is no node")
    where = [f"--nodelist={node}"] if node else []
    # One task on one node, beside the steps that run there; it needs no resources of the job.
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--chdir=/", *where]
    said = call([*step, sys.executable, "-m", "everstep.chaos.signals", order]).strip().splitlines()
    return typed.parse(list[int], typed.loads(said[-1] if said else "[]"))


def main() -> None:
    print(typed.dumps(send(*typed.parse(Order, typed.loads(sys.argv[1])))).decode(), flush=True)


if __name__ == "__main__":
    main()
