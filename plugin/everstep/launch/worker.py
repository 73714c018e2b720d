"""A worker: one rank of one group, forked warm, that runs the trainer."""

import importlib
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path

from everstep.launch import stacks
from everstep.launch.warm import redirect_output
from everstep.run.beats import DONE, STARTUP, Heartbeat
from everstep.run.events import EventLog
from everstep.run.lifeline import die_with_parent

EXIT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Place:
    """Where a worker belongs; its rank and restart count come from TorchElastic's environment."""

    run_dir: Path
    group: int
    fork_point_pid: int
    first_incarnation: int
    """Incarnation of this agent's first workers: earlier agents of the group had the ones before."""
    entry: str
    """`module:function` to call with the argv."""


def log_path(run_dir: Path, group: int, rank: int) -> Path:
    """Everything that a rank prints, over all its incarnations."""
    return Path(run_dir) / "logs" / f"group-{group}" / f"rank-{rank}.log"


def start(place: Place, argv: list[str]) -> None:
    """TorchElastic's entry point. Runs the trainer and returns when it is done or was asked to stop."""
    die_with_parent(place.fork_point_pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork point ignores it; the trainer installs its own handler
    rank = int(os.environ["RANK"])
    incarnation = place.first_incarnation + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    heart = Heartbeat(place.run_dir, place.group, rank)
    heart.beat(STARTUP)
    redirect_output(log_path(place.run_dir, place.group, rank))
    stacks_file = stacks.listen(place.run_dir, place.group, rank)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(
        f"=== group {place.group} rank {rank} incarnation {incarnation} pid {os.getpid()} {now} ===",
        flush=True,
    )
    events = EventLog(place.run_dir, place.group, rank, "worker")
    startup_s = time.monotonic() - float(os.environ["EVERSTEP_WORKERS_STARTED"])
    events.emit(
        "worker_up",
        incarnation=incarnation,
        pid=os.getpid(),
        startup_s=startup_s,
        cpu_s=time.process_time(),  # a fork's clock starts at 0: next to nothing, or something was imported
    )
    try:
        main(argv, place.entry)
    except Exception:
        traceback.print_exc()  # TorchElastic takes it to the agent's log; this rank's own has it as well
        raise
    heart.beat(DONE)
    stacks_file.close()
    util.Finalize(None, _leave_soon, exitpriority=100)


def main(argv: list[str], entry: str = "everstep.train:main") -> None:
    """Call the trainer with torchtitan-style `argv` in this process.

    A trainer that ends with `SystemExit(0)` has ended well; any other exit is passed on.
    """
    module, _, function = entry.partition(":")
    sys.argv = [module, *argv]
    try:
        getattr(importlib.import_module(module), function)(argv)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _leave_soon() -> None:
    """A finished worker whose left-over threads do not end must not keep its group from finishing."""
    timer = threading.Timer(EXIT_TIMEOUT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
