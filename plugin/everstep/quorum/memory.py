"""A host's free memory, shared by all processes of a user on it: one that makes a copy claims what that needs, so that
not all of them see the same free bytes and take them at once."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from everstep.run.files import locked
from everstep.run.regular import is_own_directory

CLAIMS = Path(f"/dev/shm/everstep-{os.geteuid()}.claims")
"""A file for each claim, as long as what is claimed, and locked by its process until that ends."""
FACTOR = 1.5
"""Free host memory, in sizes of what is to be copied, that a copy needs."""
TURN_S = 2.0
"""Longest wait for another process that counts the claims."""


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[bool]:
    """Whether this host has memory for a copy of so many bytes, besides what others have claimed; no, if a process that
    counts the claims stands still. The copy is made in the context, at whose end it shows in the free memory."""
    with contextlib.ExitStack() as claim:
        try:
            has_room = claim.enter_context(_claim(nbytes))
        except TimeoutError:
            has_room = False
        except OSError:  # nothing can be written there, so nobody claims anything
            has_room = _fits(nbytes, 0)
        yield has_room


def _fits(nbytes: int, taken: int) -> bool:
    return psutil.virtual_memory().available - taken > FACTOR * nbytes


@contextlib.contextmanager
def _claim(nbytes: int) -> Iterator[bool]:
    CLAIMS.mkdir(mode=0o700, exist_ok=True)
    if not is_own_directory(CLAIMS):
        raise PermissionError(f"{CLAIMS} is another user's")
    path = CLAIMS / uuid.uuid4().hex
    with contextlib.ExitStack() as claim:
        with locked(CLAIMS / "turn", TURN_S):
            mine = claim.enter_context(open(path, "w"))  # in its turn: nobody sees it before it is locked
            fcntl.flock(mine, fcntl.LOCK_EX)
            has_room = _fits(nbytes, sum(map(_claimed, CLAIMS.iterdir())))
            if has_room:
                mine.truncate(nbytes)
        try:
            yield has_room
        finally:
            path.unlink(missing_ok=True)


def _claimed(path: Path) -> int:
    """What a claim says; one whose process has ended is removed."""
    with contextlib.suppress(FileNotFoundError), open(path) as claim:  # given back meanwhile
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.fstat(claim.fileno()).st_size
        path.unlink()
    return 0
