"""A run directory: one run of one config, at most one supervisor at a time."""

import fcntl
import os
import shutil
import time
import tomllib
from pathlib import Path


class LaunchError(Exception):
    """Something the user can put right; its text is all they need to see."""


def default_run_dir(config: Path, now: time.struct_time) -> Path:
    """`runs/<config>-<timestamp>` below the current folder."""
    return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S', now)}"


def read_toml(path: Path) -> dict:
    """The TOML file as a dict. Raises LaunchError when it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise LaunchError(f"{path}: no such file. Give the TOML file of the run.") from None
    except (IsADirectoryError, PermissionError) as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: not valid TOML: {error}.") from None


def flatten(config: dict, prefix: str = "") -> dict:
    """`{"training": {"steps": 3}}` as `{"training.steps": 3}`."""
    flat = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def differing_keys(ours: dict, theirs: dict) -> list[str]:
    """Dotted names of the keys that are not equal in two configs, sorted."""
    a, b = flatten(ours), flatten(theirs)
    missing = object()
    return sorted(key for key in a.keys() | b.keys() if a.get(key, missing) != b.get(key, missing))


class RunDir:
    """An opened and locked run directory. The lock goes with the process, however it ends."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = -1

    def lock(self) -> None:
        """Take the directory for this process. Raises LaunchError while another live run has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock = fd

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def config(self) -> Path:
        """The config this directory was started with; the workers load this one."""
        return self.path / "config.toml"

    def adopt_config(self, source: Path) -> bool:
        """Copy `source` in, or check that it is what is there already; returns whether the run continues.

        Raises LaunchError naming the keys that differ.
        """
        ours = read_toml(source)
        if not self.config.exists():
            scratch = self.config.with_suffix(".tmp")
            shutil.copyfile(source, scratch)
            scratch.replace(self.config)
            return False
        differing = differing_keys(ours, read_toml(self.config))
        if differing:
            raise LaunchError(
                f"{self.path}: holds a run of another config; these keys differ: {', '.join(differing)}. "
                "Give another --run-dir, or undo the changes."
            )
        return True
