"""A worker: one rank of one group, forked warm, that runs the trainer."""

import importlib
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

from everstep.launch import stacks
from everstep.run.beats import DONE, STARTUP, Heartbeat
from everstep.run.events import EventLog

EXIT_TIMEOUT_S = 10.0


def log_path(run_dir: Path, group: int, rank: int) -> Path:
    """Everything that a rank prints, over all its incarnations."""
    return Path(run_dir) / "logs" / f"group-{group}" / f"rank-{rank}.log"


def error_path(run_dir: Path, group: int, rank: int) -> Path:
    """Where `torch.distributed.elastic` records the exception that a rank ended with."""
    return log_path(run_dir, group, rank).with_suffix(".error.json")


def start(run_dir: str, group: int, incarnation: int, entry: str, argv: list[str]) -> None:
    """Run the trainer `entry`, `module:function`, with `argv`; returns when it is done or was asked to stop. Which rank
    this is stands in torchrun's environment variables."""
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(_work)(Path(run_dir), group, incarnation, entry, argv)
    finally:
        for child in multiprocessing.active_children():
            if child.daemon:  # a dataloader's, which would look only every 5 s whether its parent is there
                child.terminate()
    _let_others_end()


def _work(run_dir: Path, group: int, incarnation: int, entry: str, argv: list[str]) -> None:
    rank = int(os.environ["RANK"])
    heart = Heartbeat(run_dir, group, rank)
    heart.beat(STARTUP)
    stacks_file = stacks.listen(run_dir, group, rank)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"=== group {group} rank {rank} incarnation {incarnation} pid {os.getpid()} {now} ===", flush=True)
    events = EventLog(run_dir, group, rank, "worker")
    startup_s = time.monotonic() - float(os.environ["EVERSTEP_WORKERS_STARTED"])
    events.emit(
        "worker_up",
        incarnation=incarnation,
        pid=os.getpid(),
        startup_s=startup_s,
        cpu_s=time.process_time(),  # a fork's clock starts at 0: next to nothing, or something was imported
    )
    main(argv, entry)
    heart.beat(DONE)
    stacks_file.close()


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


def _let_others_end() -> None:
    """A finished worker waits for its threads and children, but those that do not end must not keep its group from
    finishing."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    threads = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    for other in [*threads, *multiprocessing.active_children()]:
        other.join(max(0.0, deadline - time.monotonic()))
