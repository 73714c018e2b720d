"""What a run takes from the machine it runs on: ports, devices, a private folder."""

import contextlib
import os
import random
import shutil
import socket
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from everstep.run.directory import LaunchError
from everstep.run.regular import read_regular

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the ports of Linux's outgoing connections: the lighthouse must get its own back."""
PRIVATE_PREFIX = "everstep-"
_LONGEST_ROOT = 57
"""Bytes in the path of a folder for private folders: a socket's path has 107, and multiprocessing adds two names."""
_SHORT_ROOTS = ("/tmp", "/dev/shm")


def devices_of_groups(visible: Sequence[str], groups: int, ranks_per_group: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each group: devices of its own while they last, then shared from the first.

    None, as inherited, where there are no devices.
    """
    if not visible:
        return [None] * groups
    return [
        ",".join(visible[(group * ranks_per_group + rank) % len(visible)] for rank in range(ranks_per_group))
        for group in range(groups)
    ]


def free_port(host: str = HOST) -> int:
    """A TCP port of PORTS that nobody has now. Raises LaunchError when there is none."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port between {PORTS.start} and {PORTS.stop} on {host}.")


def socket_root() -> Path:
    """Where folders for sockets are made: the temporary folder (TMPDIR), or where its path is too long for a
    socket's, as a batch job's may be, another one that every user has.

    Raises:
        LaunchError: there is none with a path short enough.
    """
    for root in (tempfile.gettempdir(), *_SHORT_ROOTS):
        if len(os.fsencode(root)) <= _LONGEST_ROOT and os.access(root, os.W_OK | os.X_OK):
            return Path(root)
    raise LaunchError(
        f"the path of the temporary folder {tempfile.gettempdir()} is too long for sockets, and none of "
        f"{', '.join(_SHORT_ROOTS)} can be written: set TMPDIR to a folder with at most {_LONGEST_ROOT} bytes in "
        "its path."
    )


def private_folder(run_dir: Path) -> Path:
    """A fresh folder that only this user can enter, for sockets, on a local disk.

    Removes the one that an earlier supervisor of this run directory left when it was killed.
    """
    note = run_dir / "state" / "private"
    note.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError, ValueError):
        left = Path(read_regular(note, 4096).decode())
        there = os.lstat(left)
        private = stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid() and there.st_mode & 0o777 == 0o700
        # Only what this function makes: a private folder of ours, at the place where such folders are.
        if private and left.parent == socket_root() and left.name.startswith(PRIVATE_PREFIX):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX, dir=socket_root()))
    note.write_text(str(folder))
    return folder


def listens(host: str, port: int) -> bool:
    """Whether a server accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=0.2).close()
    except OSError:
        return False
    return True
