"""Processes forked from a launcher, which has imported what they need once. A restart imports nothing.

Forking is safe because a launcher initialises no GPU and starts no thread (pyarrow's jemalloc has one of its own and
stops it around a fork).
"""

import contextlib
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.run import devices
from everstep.run.lifeline import die_with_parent
from everstep.run.stops import STOPS
from everstep.titan.imports import import_all

PRELOAD = (
    "torchft",
    "torch.distributed.elastic.multiprocessing.errors",
    "torchtitan.train",
    "everstep.train",
    "everstep.config_registry",
    "everstep.semi.worker_store",
    "everstep.titan.load",
    "everstep.titan.data.byte_tokenizer",
    "everstep.titan.data.rows",
    "everstep.titan.data.streams",
    "everstep.titan.rounds",
    "everstep.titan.trainer",
    "everstep.launch.worker",
    "everstep.quorum.lighthouse",
)
"""What workers and a lighthouse use. All of it: what a worker imports by itself delays each restart, and a restart must
not meet a newer version of a file than its group began with."""


@dataclass(frozen=True)
class Request:
    """A process to be forked: it calls `run` ("module:function") with `args`, its output is appended to `log`,
    and it has `env` besides ours."""

    run: str
    args: Sequence
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


def preload(modules: Sequence[str] = PRELOAD, stopping: Callable[[], bool] = lambda: False) -> None:
    """Import `modules` without touching a GPU, until `stopping`. Raises the module's own error when one cannot be
    imported."""
    os.environ.setdefault(devices.LOOK_ONLY, "1")
    os.environ.setdefault("RUST_LOG", "warn")  # torchft would fill the logs with every quorum, several times a step
    import_all(modules, stopping)
    if "everstep.titan.load" in modules and not stopping():
        from everstep.titan.load import parse_any

        parse_any()


class _Output(io.FileIO):
    """A stream that loses what the system does not take."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def keep_on_without_output() -> None:
    """From now on what stdout or stderr do not take (a full disk, a pipe that nobody reads) is lost, and ends nobody.
    Those that were closed lead nowhere."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is not getattr(sys, f"__{name}__"):
            continue  # of somebody who put another in its place
        if before is not None:
            before.reconfigure(line_buffering=True)  # whoever has it goes on with it
        output = io.BufferedWriter(_Output(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(output, errors="backslashreplace", line_buffering=True))


def redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process to `path`, line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    keep_on_without_output()


def fork(request: Request) -> int:
    """Fork a process that does what was asked for, in a session of its own, and dies with this one; its pid. To
    be called by the main thread. Raises OSError if the system has no room for another process."""
    parent_pid = os.getpid()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()  # or both would write it
    if pid := os.fork():
        return pid
    try:
        os.setsid()  # a terminal's Ctrl-C is for the launcher to handle
        signal.set_wakeup_fd(-1)
        for signum in (*STOPS, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(parent_pid)
        status = _do(request)
    except BaseException:  # noqa: BLE001  what is above in the stack is the launcher's
        status = 1
    os._exit(status)


def _do(request: Request) -> int:
    """What was asked for, in its process; the exit status. What it raises is said."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request.env)
        redirect_output(request.log)
        module, _, function = request.run.partition(":")
        status = getattr(importlib.import_module(module), function)(*request.args) or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  the last frame of a process: report whatever it was
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return status
