"""Starting a run again whose supervisor was killed: what a person would type, typed for them."""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from everstep.chaos.undo import Pid, Undo
from everstep.run import typed
from everstep.run.directory import holder_of

FREE_TIMEOUT_S = 10.0


class GoneError(RuntimeError):
    """Nobody knows any more how the run was started."""


def to_start_again(pid: int, run_dir: Path) -> Undo:
    """How the command that is process `pid` now is to be started again once it is gone, on the same run directory."""
    process = psutil.Process(pid)
    argv = process.cmdline()
    if not any(word.partition("=")[0] in ("--run-dir", "--run_dir") for word in argv):
        argv += ["--run-dir", str(run_dir)]
    args = {
        "argv": argv,
        "cwd": process.cwd(),
        "environment": process.environ(),
        "run_dir": str(run_dir),
        "killed": pid,
    }
    return Undo("start-again", args)


@dataclass(frozen=True)
class _Command:
    """What was running, to be started once `killed` is gone."""

    argv: list[str]
    cwd: str
    environment: dict[str, str]
    run_dir: str
    killed: Pid


def undo(args: dict[str, Any]) -> None:
    """Start a run's command, detached from this process; its output goes to RUN_DIR/logs/launcher.log. Does nothing
    when the process that was killed lives on, or somebody else has started the run.

    Raises:
        GoneError: the guard that knew the command was killed as well.
    """
    if not args:
        raise GoneError("the guard that knew the run's command was killed: start the run again yourself")
    command = typed.parse(_Command, args)
    run_dir, killed = command.run_dir, command.killed
    time_is_up = time.monotonic() + FREE_TIMEOUT_S
    while (holder := holder_of(Path(run_dir))) is not None:
        if holder[0] != killed or time.monotonic() > time_is_up:
            return
        time.sleep(0.05)
    log = Path(run_dir) / "logs" / "launcher.log"
    with log.open("ab") as output:
        subprocess.Popen(
            command.argv,
            cwd=command.cwd,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
