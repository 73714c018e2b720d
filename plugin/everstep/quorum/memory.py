"""A host's free memory, shared by its ranks: one that makes a copy claims what that needs, so that not all of them see
the same free bytes and take them at once."""

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

FACTOR = 1.5
"""Free host memory, in sizes of what is to be copied, that a copy needs."""
CLAIM_S = 60.0
"""A claim is over after so long, or with its process; the copy that it was for shows in the free memory by then."""


def claims_file() -> Path:
    """Of this user's claims on this host."""
    folder = Path("/dev/shm")
    return (folder if folder.is_dir() else Path(tempfile.gettempdir())) / f"everstep-{os.getuid()}.memory"


@contextlib.contextmanager
def claimed(nbytes: int, path: Path | None = None) -> Iterator[bool]:
    """Whether this host has memory for a copy of so many bytes, besides what others have claimed. The claim is given
    back at the end of the context, in which the copy is made."""
    path = path or claims_file()
    mine = [os.getpid(), time.monotonic_ns(), nbytes]
    with _claims(path) as claims:
        free = psutil.virtual_memory().available - sum(taken for _, _, taken in claims)
        granted = free > FACTOR * nbytes
        if granted:
            claims.append(mine)
    try:
        yield granted
    finally:
        if granted:
            with _claims(path) as claims:
                claims[:] = [claim for claim in claims if claim != mine]


@contextlib.contextmanager
def _claims(path: Path) -> Iterator[list[list[int]]]:
    """The claims that count, to be changed in the context; nobody else changes them meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        oldest = time.monotonic_ns() - int(CLAIM_S * 1e9)
        claims = [claim for claim in _read(file.read()) if claim[1] > oldest and psutil.pid_exists(claim[0])]
        yield claims
        file.seek(0)
        file.truncate()
        json.dump(claims, file)


def _read(text: str) -> list[list[int]]:
    """What `_claims` wrote; nothing if it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return [claim for claim in found if isinstance(claim, list) and [type(word) for word in claim] == [int, int, int]]
