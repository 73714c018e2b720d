"""Signals to processes of a run, and to no other: a pid counts only with the time at which the run announced it.

    python -m everstep.chaos.signals '[[[PID, SINCE], …], SIGNUM]'

does on a node of a cluster what `send` does here.
"""

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import psutil

from everstep.launch.slurm import call
from everstep.run import typed
from everstep.run.directory import LaunchError

SLACK_S = 1.0
"""By how much a process may seem to be younger than its announcement: the kernel counts starts in jiffies."""

Known = tuple[Annotated[int, typed.Within(2, 1 << 31)], float]
"""A pid, of one process (not init, and none of the numbers below 1 that mean many), and the wall time at which the run
had that process."""


Order = tuple[list[Known], Annotated[int, typed.Within(1, 64)]]
"""What `main` is to do: whom to send which signal."""


def is_same(pid: int, since: float) -> bool:
    """Whether the process of that pid lives and is the one announced at `since`, not a later one."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since + SLACK_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(procs: Sequence[Known], signum: int) -> list[int]:
    """Send a signal to those processes of this machine that are still the ones announced; returns their pids."""
    reached = []
    for pid, since in procs:
        try:
            fd = os.pidfd_open(pid)  # from here on the pid cannot become another process's under us
        except ProcessLookupError:
            continue
        try:
            if is_same(pid, since):
                signal.pidfd_send_signal(fd, signum)
                reached.append(pid)
        except ProcessLookupError:
            continue
        finally:
            os.close(fd)
    return reached


def send_on(job: str, node: str, procs: Sequence[Known], signum: int) -> list[int]:
    """The same on a node of a Slurm job, "" for a job of one node. Raises LaunchError when Slurm refuses, and for what
    is no process or node."""
    try:
        order = typed.dumps(typed.parse(Order, [list(procs), int(signum)])).decode()
    except typed.UnfitError as error:
        raise LaunchError(f"these are no processes of a run: {error}") from None
    if not re.fullmatch(r"([A-Za-z0-9._][A-Za-z0-9._-]{0,254})?", node):
        raise LaunchError(f"{node!r} is no node")
    where = [f"--nodelist={node}"] if node else []
    # As one task of one node beside what runs there; it takes no resources of its own.
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--chdir=/", *where]
    said = call([*step, sys.executable, "-m", "everstep.chaos.signals", order]).strip().splitlines()
    return typed.parse(list[int], typed.loads(said[-1] if said else "[]"))


def main() -> None:
    print(typed.dumps(send(*typed.parse(Order, typed.loads(sys.argv[1])))).decode(), flush=True)


if __name__ == "__main__":
    main()
