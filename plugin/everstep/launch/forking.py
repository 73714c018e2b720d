"""Processes forked on request, from one that has everything imported and no thread of its own (`warm`).

Forking is safe because whoever forks here initialises no CUDA and starts no thread (pyarrow's jemalloc has one of its
own and stops it around a fork). What is forked is detached: the launcher, a subreaper above, becomes its parent.
"""

import contextlib
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from everstep.run.lifeline import die_with_adopter


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
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    keep_on_without_output()


def _resolve(name: str) -> Callable[..., int | None]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def become(request: Mapping[str, Any], parent_pid: int) -> None:
    """Turn this forked process into what was asked for, which dies with `parent_pid`; never returns."""
    status = 1
    try:
        die_with_adopter(parent_pid)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(request["env"])
        redirect_output(Path(request["log"]))
        status = _resolve(request["run"])(*request["args"]) or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  the last frame of a process: report whatever it was
        traceback.print_exc()
    finally:
        _end(status, sys.stdout, sys.stderr)


def _end(status: int, *streams: TextIO) -> None:
    """End this process here, whatever becomes of its last words: what is above in its stack is its maker's. Never
    returns."""
    try:
        for stream in streams:
            stream.flush()
    finally:
        os._exit(status)


def forked(run: Callable[[], None]) -> int:
    """Fork a process that calls `run` and ends: with status 0, or 1 and the traceback of what it raised; its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException:  # noqa: BLE001  the last frame of a process
            traceback.print_exc()
        finally:
            _end(status, sys.stderr)
    return pid


def fork_detached(request: Mapping[str, Any], adopter_pid: int, close: Callable[[], None]) -> int:
    """Fork a grandchild that runs `request`, in a session of its own; returns its pid. The child in between ends at
    once, and `adopter_pid`, a subreaper above this process, becomes the parent. `close` is called in the grandchild.

    Raises OSError if the system has no room for another process.
    """
    answer_r, answer_w = os.pipe()

    def fork_again() -> None:
        os.close(answer_r)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid:
            os.write(answer_w, str(pid).encode())
            return
        os.close(answer_w)
        close()
        os.setsid()  # a terminal's Ctrl-C is for the launcher to handle
        become(request, adopter_pid)

    try:
        middle = forked(fork_again)
        os.close(answer_w)
        answer_w = -1
        pid = int(os.read(answer_r, 32))
        os.waitpid(middle, 0)
    finally:
        for fd in (answer_r, answer_w):
            if fd >= 0:
                os.close(fd)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid
