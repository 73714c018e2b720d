"""A worker: the process of one rank of a group. It runs the trainer, and is forked from a launcher with all imports."""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep.launch.machine import follow_threads
from everstep.run.beats import DONE, STARTUP, BeatFile, beat_path
from everstep.run.events import EventLog
from everstep.run.exits import TrainerEnds
from everstep.run.fence import rank_lock
from everstep.run.files import lock_for_life, open_own

EXIT_TIMEOUT_S = 10.0
PREDECESSOR_TIMEOUT_S = 120.0
LONGEST_ERROR = 300
ENTRY = "torchtitan.train:main"
"""`module:function` that trains as `sys.argv` says. The launcher has imported the module."""
OOM_SCORE = 300
"""Added to a worker's oom_score_adj (thousandths of all memory, `proc(5)`): the kernel kills it before the launcher."""
STACKS_SIGNAL = signal.SIGUSR2
"""Signal at which a worker writes its threads' stacks, by faulthandler, even if it hangs in C or holds the GIL."""
STORE_TIMEOUT = timedelta(seconds=60)


def log_path(run_dir: Path, group: int, rank: int) -> Path:
    """Return the file of all output of a rank, over all its incarnations."""
    return Path(run_dir) / "logs" / f"group-{group}" / f"rank-{rank}.log"


def start(run_dir: Path, group: int, incarnation: int, argv: list[str], listener: int) -> None:
    """Run a trainer until it is done or was asked to stop. torchrun's environment variables say which rank this is. An
    exception that ends the trainer is told in the event `worker_failed`.

    Args:
        argv: of the trainer.
        listener: descriptor of a socket that listens only at the address of the group's store, which this rank then
            serves. A store that opened its own would listen on every interface, and the other ranks would have to wait
            for it. -1: another rank serves the store.
    """
    rank = int(os.environ["RANK"])
    events = EventLog(run_dir, group, rank, "worker")
    _die_before_the_launcher()
    store = None if listener < 0 else _serve_store(listener)
    try:
        await_predecessor(run_dir, group, rank)
        _work(run_dir, group, incarnation, argv, events)
    except Exception as error:
        lines = [] if isinstance(error, TrainerEnds) else traceback.format_exception(error)
        events.emit("worker_failed", pid=os.getpid(), error=_described(error), traceback="".join(lines).splitlines())
        if isinstance(error, TrainerEnds):
            traceback.print_exc()
            sys.exit(error.status)
        raise
    _let_others_end()
    del store


def _die_before_the_launcher() -> None:
    """Have the kernel kill this process, or one that it starts, before the launcher when memory is used up: without
    its launcher the run would end, and nothing would say why."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # it is not allowed here
        score.write_text(str(min(int(score.read_text()) + OOM_SCORE, 1000)))


def _serve_store(listener: int) -> Any:
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(
        host, port, is_master=True, timeout=STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener
    )


def _described(error: Exception) -> str:
    """Return an exception in one line; of a `TrainerEnds` its text."""
    if isinstance(error, TrainerEnds):
        return " ".join(str(error).splitlines())
    name = type(error).__qualname__
    lines = str(error).strip().splitlines()
    return (f"{name}: {lines[0]}" if lines else name)[:LONGEST_ERROR]


def await_predecessor(run_dir: Path, group: int, rank: int) -> None:
    """Lock this rank for this process, after waiting until no earlier one holds it: if its launcher was killed, it may
    take a while to die. Raises TimeoutError."""
    path = rank_lock(run_dir, group, rank)
    deadline = time.monotonic() + PREDECESSOR_TIMEOUT_S
    while not lock_for_life(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"an earlier process of rank {rank} of group {group} still holds {path}: kill it")
        time.sleep(0.02)


def _work(run_dir: Path, group: int, incarnation: int, argv: list[str], events: EventLog) -> None:
    rank = int(os.environ["RANK"])
    follow_threads()
    heart = BeatFile(beat_path(run_dir, group, rank))
    heart.beat(STARTUP)
    stacks_path = log_path(run_dir, group, rank).with_suffix(".stacks")
    stacks = os.fdopen(open_own(stacks_path, os.O_APPEND), "a")  # those of its stalls, the newest last
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"=== group {group} rank {rank} incarnation {incarnation} pid {os.getpid()} {now} ===", flush=True)
    events.emit(
        "worker_up",
        incarnation=incarnation,
        pid=os.getpid(),
        cpu_s=time.process_time(),  # starts at 0 in a fork, so it is small unless this worker had to import modules
    )
    module, _, function = ENTRY.partition(":")
    sys.argv = [module, *argv]
    try:
        getattr(importlib.import_module(module), function)()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    heart.beat(DONE)
    faulthandler.unregister(STACKS_SIGNAL)
    stacks.close()


def _let_others_end() -> None:
    """Wait for the threads and child processes of this finished worker, except daemons, for EXIT_TIMEOUT_S together:
    those that do not end must not keep the group from finishing. Idle threads of pools (torch's compilers keep some)
    would never end."""
    for one in gc.get_objects():
        if issubclass(type(one), ThreadPoolExecutor):  # `isinstance` would run code of lazy proxies
            one.shutdown(wait=False)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    threads = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    children = [one for one in multiprocessing.active_children() if not one.daemon]
    for other in [*threads, *children]:
        other.join(max(0.0, deadline - time.monotonic()))
