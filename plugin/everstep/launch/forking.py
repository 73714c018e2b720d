"""Forking processes from a launcher that has imported all modules they need, so that a restart imports nothing.

Forking is safe because a launcher initialises no GPU and starts no thread. (pyarrow's jemalloc starts a thread, but
stops it around a fork.)
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from everstep.launch.machine import LOOK_ONLY
from everstep.run.directory import LaunchError
from everstep.run.files import open_own
from everstep.run.output import keep_on_without_output
from everstep.run.stops import STOPS, die_with_parent
from everstep.titan.imports import TORCHTITAN, import_all

PRELOAD = (*TORCHTITAN, "torchft", "everstep.config_registry", "everstep.quorum.lighthouse")
"""With what they import, all modules that workers and a lighthouse use. A module that a worker had to import would
delay each restart, and its file might be newer than what the group began with."""
Main = Callable[[], int | None]
"""What a forked process does. It returns the exit status; None stands for 0."""


def preload(modules: Sequence[str] = PRELOAD, stopping: Callable[[], bool] = lambda: False) -> None:
    """Import `modules` without touching a GPU, until `stopping()`. Raises LaunchError if one cannot be imported."""
    os.environ.setdefault(LOOK_ONLY, "1")
    os.environ.setdefault("RUST_LOG", "warn")  # else torchft logs every quorum, several times a step
    try:
        import_all(modules, stopping)
        if "everstep.titan.load" in modules and not stopping():
            from everstep.titan.load import warm_up_parser

            warm_up_parser()
    except Exception as error:
        raise LaunchError(f"{type(error).__name__}: {error}") from error


def fork(main: Main, log: Path, env: Mapping[str, str]) -> int:
    """Fork a process in a new session, and return its pid. It calls `main`, appends its output to `log`, and has the
    variables `env` in addition to this process's environment. The kernel kills it when this process dies. Call it in
    the main thread. Raises OSError if the system has no room for another process."""
    parent_pid = os.getpid()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()  # else both processes would write what is buffered
    if pid := os.fork():
        return pid
    status = 1
    with contextlib.suppress(BaseException):  # the frames above are the launcher's and must not run in a child
        os.setsid()  # only the launcher handles a terminal's Ctrl-C
        signal.set_wakeup_fd(-1)
        for signum in (*STOPS, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(parent_pid)
        status = _do(main, log, env)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _do(main: Main, log: Path, env: Mapping[str, str]) -> int:
    """Call `main` in the forked process, and return the exit status. An exception is printed."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(env)
        output = open_own(log, os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        keep_on_without_output()
        return main() or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  this is the last frame of the process: print any error
        traceback.print_exc()
        return 1
