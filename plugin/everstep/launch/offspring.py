"""What workers start themselves and leave behind: processes of a dataloader, plain subprocesses.

The launcher adopts them, and they are known by not being in the session of a worker that lives. Keepers of snapshots
are meant to stay. If the launcher is killed, the kernel kills the workers; what they had started has to notice that by
itself, as a dataloader's processes do.
"""

import contextlib
import os
import signal
from collections.abc import Collection

import psutil

from everstep.report import live

KEPT = ("everstep.snapshot.keeper", live.__name__)
"""Modules of processes that end otherwise: keepers of snapshots wait for the next start, the page's writer for its
server."""


def left_behind(known: Collection[int]) -> list[psutil.Process]:
    """The orphans of processes that have ended, with all below them. This process is a subreaper: they are its
    children.

    `known` are those that it has started itself and that live, each of which leads a session.
    """
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if child.pid not in known and os.getsid(child.pid) not in known and not is_kept(child):
                found |= {one.pid: one for one in (child, *child.children(recursive=True)) if not is_kept(one)}
    return list(found.values())


def kill(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signal.SIGKILL)  # psutil looks first whether the pid is another's by now


def is_kept(process: psutil.Process) -> bool:
    """Whether it is to be left alone."""
    try:
        return any(module in process.cmdline() for module in KEPT)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
