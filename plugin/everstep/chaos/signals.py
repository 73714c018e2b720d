"""Signals to processes of a run, and to no other: a pid counts only with the time at which the run announced it.

    python -m everstep.chaos.signals '{"procs": [[PID, SINCE], …], "signum": 9}'

does on a node of a cluster what `send` does here.
"""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import psutil

from everstep.chaos.undo import Known
from everstep.run import typed

SLACK_S = 1.0
"""By how much a process may seem to be younger than its announcement: the kernel counts starts in jiffies."""


@dataclass(frozen=True)
class _Stopped:
    """What goes on again when a fault ends."""

    procs: list[Known]


@dataclass(frozen=True)
class _Order:
    procs: list[Known]
    signum: Annotated[int, typed.Within(1, 64)]


def is_same(pid: int, since: float) -> bool:
    """Whether the process of that pid lives and is the one announced at `since`, not a later one."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since + SLACK_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(procs: Sequence[Known], signum: int) -> list[int]:
    """Send a signal to those that are still the ones announced; returns their pids."""
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


def undo(args: dict[str, Any]) -> None:
    """SIGCONT to the processes that were stopped, if they are still those."""
    send(typed.parse(_Stopped, args).procs, signal.SIGCONT)


def main() -> None:
    order = typed.parse(_Order, typed.loads(sys.argv[1]))
    print(typed.dumps(send(order.procs, order.signum)).decode())


if __name__ == "__main__":
    main()
