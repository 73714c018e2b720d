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


def private_folder(run_dir: Path) -> Path:
    """A fresh folder that only this user can enter, on a local disk.

    Removes the one that an earlier supervisor of this run directory left when it was killed.
    """
    note = run_dir / "state" / "private"
    note.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError, ValueError):
        left = Path(read_regular(note, 4096).decode())
        there = os.lstat(left)
        private = stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid() and there.st_mode & 0o777 == 0o700
        # Only what this function makes: a private folder of ours, at the place where such folders are.
        if private and left.parent == Path(tempfile.gettempdir()) and left.name.startswith(PRIVATE_PREFIX):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX))
    note.write_text(str(folder))
    return folder


def listens(host: str, port: int) -> bool:
    """Whether a server accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=0.2).close()
    except OSError:
        return False
    return True
