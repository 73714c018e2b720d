"""Starting a run again whose supervisor was killed: what a person would type, typed for them."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from everstep.chaos.undo import Undo
from everstep.run.directory import holder_of

FREE_TIMEOUT_S = 10.0


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
    return Undo("everstep.chaos.launcher:start_again", args)


def start_again(argv: Sequence[str], cwd: str, environment: dict[str, str], run_dir: str, killed: int) -> None:
    """Start a run's command, detached from this process, once `killed` is gone; its output goes to
    RUN_DIR/logs/launcher.log. Does nothing when that process lives on, or somebody else has started the run."""
    time_is_up = time.monotonic() + FREE_TIMEOUT_S
    while (holder := holder_of(Path(run_dir))) is not None:
        if holder[0] != killed or time.monotonic() > time_is_up:
            return
        time.sleep(0.05)
    log = Path(run_dir) / "logs" / "launcher.log"
    with log.open("ab") as output:
        subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
