"""No litter: shared memory that no run owns any more, found and given back.

A keeper removes its segment when it ends. One that was killed cannot; then the segment stays for the next start of its
run. If there never is one, `everstep snapshots --sweep` removes it, or the next keeper on the host, once the run
directory is gone or nobody has touched the segment for longer than `keeper_ttl_s`.
"""

import fcntl
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.run.files import read_json, write_json
from everstep.run.token import read_token
from everstep.snapshot.room import is_own_directory
from everstep.snapshot.segment import run_id

OWNER_FILE = "owner.json"
ALIVE_S = 60.0
"""A segment that a trainer has touched this recently belongs to a run that goes on, though its keeper died."""
_SEGMENT = re.compile(r"everstep-([0-9a-f]{16})-group-(\d+)")


@dataclass(frozen=True)
class Litter:
    """A segment that no living keeper has."""

    path: Path
    run_dir: Path | None
    """Of the run it belongs to, as far as it says so."""
    size: int
    """Bytes."""
    age_s: float
    """Since anything in it was written."""
    run_is_there: bool
    """Its run directory is there and still that run's: it could be started again."""

    def describe(self) -> str:
        owner = self.run_dir or "an unknown run"
        state = "which could be started again" if self.run_is_there else "which is gone"
        age = f"{self.age_s / 3600:.1f} h" if self.age_s >= 3600 else f"{self.age_s:.0f} s"
        return f"{self.path}: {self.size / 1e6:.1f} MB of {owner}, {state}; last written {age} ago"


def write_owner(segment: Path, run_dir: Path) -> None:
    """Say in a segment which run it belongs to."""
    write_json(segment / OWNER_FILE, {"run_dir": str(run_dir)})


def find(directory: Path) -> list[Litter]:
    """The segments of this user in `directory` that no living keeper has, the oldest first."""
    found = []
    for path in directory.glob("everstep-*-group-*"):
        match = _SEGMENT.fullmatch(path.name)
        try:
            if match is None or not is_own_directory(path) or _is_kept(path):
                continue
            files = [file.stat() for file in path.iterdir() if file.is_file()]
            newest = max([path.stat().st_mtime, *(file.st_mtime for file in files)])
            size = sum(file.st_blocks * 512 for file in files)
        except OSError:
            continue  # it is being removed
        run_dir = _owner(path)
        there = run_dir is not None and _is_run(run_dir, match.group(1))
        found.append(Litter(path, run_dir, size, max(0.0, time.time() - newest), there))
    return sorted(found, key=lambda litter: -litter.age_s)


def remove(litter: Litter) -> bool:
    """Give the memory back, unless a keeper has taken the segment over meanwhile."""
    fd = _lock(litter.path)
    if fd is None:
        return False
    try:
        shutil.rmtree(litter.path, ignore_errors=True)
    finally:
        os.close(fd)
    return not litter.path.exists()


def sweep_behind(directory: Path, ttl_s: float) -> list[Litter]:
    """What a starting keeper removes of others: runs that are gone, or untouched for longer than the time to live."""
    swept = [litter for litter in find(directory) if not litter.run_is_there or litter.age_s > ttl_s]
    return [litter for litter in swept if remove(litter)]


def sweep(directory: Path) -> int:
    """`everstep snapshots --sweep`: say whose each segment is and how old, and remove those that no live run owns."""
    found = find(directory)
    for litter in found:
        alive = litter.run_is_there and litter.age_s < ALIVE_S
        done = "kept: its run is going on" if alive else "removed" if remove(litter) else "kept: a keeper has it now"
        print(f"{litter.describe()}: {done}")
    if not found:
        print(f"{directory} holds no snapshots that are nobody's")
    return 0


def _is_kept(path: Path) -> bool:
    fd = _lock(path)
    if fd is None:
        return True
    os.close(fd)
    return False


def _lock(path: Path) -> int | None:
    """The segment's lock, as its keeper would hold it; None while one does, or while a trainer has just made it."""
    if not (path / "lock").exists() and time.time() - path.stat().st_mtime < 60:
        return None  # its keeper is starting
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _owner(path: Path) -> Path | None:
    found = read_json(path / OWNER_FILE).get("run_dir")
    return Path(found) if isinstance(found, str) else None


def _is_run(run_dir: Path, run: str) -> bool:
    try:
        return run_id(read_token(run_dir)) == run
    except (OSError, ValueError):
        return False
