"""Signals to processes of a run, and to no other: a pid counts only with the time at which the run announced it.

    python -m everstep.chaos.signals '{"procs": [[PID, SINCE], …], "signum": 9, "lasts_s": 0}'

does on a node of a cluster what `send` does here. With lasts_s it stays that long and then has them go on, or at once
when its stdin ends, which the kernel does for an injector that was killed. If that process is killed as well, a worker
stays stopped until the watchdog of its run ends its group, after stall_timeout_s.
"""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import psutil

from everstep.run import typed
from everstep.run.directory import LaunchError
from everstep.run.stops import STOPS

SLACK_S = 1.0
"""By how much a process may seem to be younger than its announcement: the kernel counts starts in jiffies."""
COMMAND_TIMEOUT_S = 60.0

Known = tuple[Annotated[int, typed.Within(2, 1 << 31)], float]
"""A pid, of one process (not init, and none of the numbers below 1 that mean many), and the wall time at which the run
had that process."""


@dataclass(frozen=True)
class Receivers:
    """Processes that can be reached by one command: those of this machine, or of one job on one node."""

    procs: list[Known]
    job: Annotated[int, typed.Within(0, 1 << 40)] = 0
    """The Slurm job; 0: this machine."""
    node: str = ""
    """Its node; "" for a job of one node."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{0,255}", self.node) or self.node.startswith("-"):
            raise ValueError(f"{self.node!r} is no node")

    def signal(self, signum: int) -> list[int]:
        """Send a signal to those that are still the ones announced; returns their pids. Raises LaunchError when Slurm
        refuses."""
        if not self.job:
            return send(self.procs, signum)
        said = output(self._words(signum, 0.0)).strip().splitlines()
        return typed.parse(list[int], typed.loads(said[-1] if said else "[]"))

    def hold(self, lasts_s: float, errors: IO[bytes] | int) -> subprocess.Popen[bytes]:
        """The process, in a session of its own, that stops them now and has them go on in `lasts_s` seconds, or when
        its stdin is closed. It ends with status 0 when that is done."""
        search = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            self._words(signal.SIGSTOP, lasts_s),
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        )

    def _words(self, signum: int, lasts_s: float) -> list[str]:
        """Of the command that does it where the processes are."""
        what = typed.dumps({"procs": self.procs, "signum": int(signum), "lasts_s": lasts_s}).decode()
        words = [sys.executable, "-m", "everstep.chaos.signals", what]
        if not self.job:
            return words
        where = [f"--nodelist={self.node}"] if self.node else []
        # As one task of one node beside what runs there; it takes no resources of its own.
        return ["srun", f"--jobid={self.job}", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", *where, *words]


@dataclass(frozen=True)
class _Order:
    procs: list[Known]
    signum: Annotated[int, typed.Within(1, 64)]
    lasts_s: Annotated[float, typed.Within(0, 1e9)] = 0.0


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


def output(command: Sequence[str]) -> str:
    """What a command of Slurm says. Raises LaunchError when it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S, cwd=Path("/")
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"no answer within {COMMAND_TIMEOUT_S:g} s: {shlex.join(command)}") from None
    if done.returncode:
        raise LaunchError(f"{done.stderr.strip() or done.stdout.strip()}\n  {shlex.join(command)}")
    return done.stdout


def main() -> None:
    # What is meant for the injector, a Ctrl-C or the end of its terminal, must not keep us from ending a fault.
    for number in (*STOPS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    order = typed.parse(_Order, typed.loads(sys.argv[1]))
    print(typed.dumps(send(order.procs, order.signum)).decode(), flush=True)
    if order.lasts_s:
        select.select([0], [], [], order.lasts_s)
        send(order.procs, signal.SIGCONT)


if __name__ == "__main__":
    main()
