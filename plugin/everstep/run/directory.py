"""A run directory: everything of one run, and at most one supervisor at a time."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil

from everstep.run.files import read_typed
from everstep.run.regular import open_regular
from everstep.run.typed import Within


class LaunchError(Exception):
    """Something the user can put right; its text is all they need to see."""


def default_run_dir(config: Path, now: time.struct_time) -> Path:
    """`runs/<config>-<timestamp>` below the current folder."""
    return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S', now)}"


@contextlib.contextmanager
def leaves_nothing(path: Path, refusal: type[Exception] = LaunchError) -> Iterator[None]:
    """A folder that was not there before goes again, with the ones above it that were made for it, when what is done
    in it ends with `refusal`."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except refusal:
        if made:
            shutil.rmtree(path, ignore_errors=True)
            for folder in made[1:]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise


def make_run_dir(path: Path) -> None:
    """Make a run directory that nobody else can write to, whatever the umask and the folder above it say. One that is
    there stays as it is."""
    path.mkdir(mode=0o755, parents=True, exist_ok=True)


@dataclass(frozen=True)
class GroupOver:
    """How a group ended for good."""

    status: str
    """done, stopped or failed."""
    reason: str


class RunDir:
    """An opened and locked run directory. The lock goes with the process, however it ends; what it forks has none."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = -1

    def lock(self) -> None:
        """Take the directory for this process. Raises LaunchError while another live run has it."""
        try:
            make_run_dir(self.path)
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise LaunchError(f"{self.path}: cannot be used as run directory: {error.strerror}.") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise LaunchError(
                f"{self.path}: in use by a run that is still going (pid {holder or 'unknown'}). "
                "Stop it, or give another --run-dir."
            ) from None
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(fd)
            raise LaunchError(f"{self.path}: cannot be used as run directory: {error.strerror}.") from None
        self._lock = fd
        os.register_at_fork(after_in_child=self.unlock)

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def config(self) -> Path:
        """The run's config with everything resolved; the workers load this one."""
        return self.path / "config.toml"


def holder_of(path: Path) -> tuple[int, float] | None:
    """Who has the run directory locked, without touching the lock: its pid, and the wall time at which it said so.
    None: nobody on this machine."""
    lock = path.resolve() / ".lock"
    try:
        with open_regular(lock, links=False, limit=4096) as file:
            found, text = os.fstat(file.fileno()), file.read()
        pid = int(text)
        holds = pid in _lockers(found.st_ino)
        holds = holds and any(file.path == str(lock) for file in psutil.Process(pid).open_files())
    except (OSError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    return (pid, found.st_mtime) if holds else None


def _lockers(inode: int) -> set[int]:
    """The processes that hold an exclusive flock on a file of this number, as the kernel tells (proc(5), locks)."""
    rows = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return {
        int(row[4])
        for row in rows
        if len(row) > 5 and row[1] == "FLOCK" and row[3] == "WRITE" and row[5].rpartition(":")[2] == str(inode)
    }


def over_file(run_dir: Path, group: int) -> Path:
    """Says how a group ended for good: a `GroupOver`. A batch job starts a group again as long as there is none,
    whatever the exit status of its processes."""
    return Path(run_dir) / "state" / f"group-{group}.over"


def starts_file(run_dir: Path, group: int) -> Path:
    """Says how often a batch job has started a group since its last commit."""
    return Path(run_dir) / "state" / f"group-{group}.starts"


def bad_node_file(run_dir: Path, group: int) -> Path:
    """Names the node that a group's last agent found bad: {"node", "reason", "claim"}."""
    return Path(run_dir) / "state" / f"group-{group}.bad-node.json"


def stop_file(run_dir: Path) -> Path:
    """Asks every agent of the run for a clean stop, as long as it is there."""
    return Path(run_dir) / "state" / "stop"


@dataclass(frozen=True)
class Wanted:
    """What `groups_file` holds."""

    groups: Annotated[int, Within(1)]


def groups_file(run_dir: Path) -> Path:
    """Says how many groups a live run is to have, if that was changed: a `Wanted`. The next start removes it."""
    return Path(run_dir) / "state" / "groups.json"


def wanted_groups(run_dir: Path, groups: int) -> int:
    """How many groups a run is to have that was started with `groups`: 0 to this, less 1, are their ids."""
    wanted = read_typed(Wanted, groups_file(run_dir))
    return groups if wanted is None else wanted.groups


def ended_file(run_dir: Path) -> Path:
    """Says why no group of the run can go on: {"reason"}. The next start of the run removes it."""
    return Path(run_dir) / "state" / "ended.json"


def ask_to_stop(run_dir: Path) -> None:
    """Make `stop_file`."""
    stop_file(run_dir).parent.mkdir(parents=True, exist_ok=True)
    stop_file(run_dir).touch()
