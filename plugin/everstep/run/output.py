"""The stdout and stderr of a process that has to go on whatever becomes of them."""

import contextlib
import io
import os
import select
import stat
import sys

PATIENCE_S = 0.1
"""Seconds to wait for a reader who is behind, unless the output before was dropped."""


class _Output(io.FileIO):
    """A stream that drops output that the system refuses, or that nobody reads, without an error."""

    _is_read = True

    def write(self, data) -> int:
        written = None  # as `super().write` returns if it would block
        with contextlib.suppress(OSError):
            written = super().write(data)
            if written is None and self._is_read:
                select.select([], [self], [], PATIENCE_S)
                written = super().write(data)
        self._is_read = written is not None
        return memoryview(data).nbytes if written is None else written


def keep_on_without_output() -> None:
    """Make failures of stdout and stderr harmless: output that they refuse (a full disk, a closed pipe) or that nobody
    reads (a stopped terminal, a full pipe) is dropped. If stdin, stdout or stderr is closed, it is opened on /dev/null.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is not getattr(sys, f"__{name}__"):
            continue  # a caller has replaced the stream
        if before is not None:
            before.reconfigure(line_buffering=True)  # code that holds the old stream goes on writing to it
        _never_block(fd)
        output = io.BufferedWriter(_Output(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(output, errors="backslashreplace", line_buffering=True))


def _never_block(fd: int) -> None:
    """Open a pipe or terminal anew, so that writes do not block, and do for other processes that have it as well. It
    stays as it is if it cannot be opened, as one of another user."""
    if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
        with contextlib.suppress(OSError):
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(own, fd)
            os.close(own)
