"""The run's token: a secret in the run directory that only its owner can read. It admits processes to the run."""

import os
import secrets
import shutil
import stat
from pathlib import Path

from everstep.run.directory import LaunchError, config_file, make_run_dir, require_events
from everstep.run.files import NotRegularError, open_regular, read_json, write_first, write_json

TOKEN_FILE = "token"
TOKEN_BYTES = 32
HOME_FILE = ".token-home"
"""JSON file that says for which directory the token was made."""
FOLDERS = ("state", "events", "logs")
"""Folders of a run directory whose files commands and reports believe."""


class UnsafeError(LaunchError, ValueError):
    """Other users could read the token or change the run directory, or the token's file holds no token."""


def run_token(run_dir: Path) -> bytes:
    """Return the token of a run. The first caller makes it.

    Raises:
        UnsafeError: the file holds no token, or users other than its owner could have read or written it or have
            written to the run directory.
    """
    path = Path(run_dir) / TOKEN_FILE
    make_run_dir(path.parent)
    require_own(path.parent)
    write_first(path, (secrets.token_hex(TOKEN_BYTES) + "\n").encode(), mode=0o600)
    return read_token(run_dir)


def own_token(run_dir: Path) -> bytes:
    """Like `run_token`, for a process that starts a run and is the only one to do so.

    If this run directory is a copy of another that still exists, it gets a new token: it is another run, with its own
    snapshots and keepers. Raises like `run_token`.
    """
    token, here = run_token(run_dir), run_dir.resolve()
    home = run_dir / HOME_FILE
    told = read_json(home).get("run_dir")
    before = Path(str(told or here))
    if before != here and _is_of(before, token) and not before.samefile(here):
        token = new_token(run_dir)
    if told != str(here):  # else a full disk ends no lighthouse that starts again
        write_json(home, {"run_dir": str(here)})
    return token


def new_token(run_dir: Path) -> bytes:
    """Replace the token of a run of which nothing lives: it is another run then, with its own snapshots and keepers.
    Raises like `run_token`."""
    (run_dir / TOKEN_FILE).unlink(missing_ok=True)
    shutil.rmtree(run_dir / "state" / "keepers", ignore_errors=True)
    return run_token(run_dir)


def _is_of(run_dir: Path, token: bytes) -> bool:
    try:
        return read_token(run_dir) == token
    except (OSError, ValueError):  # there is none, it is unsafe, or this is no path
        return False


def read_token(run_dir: Path) -> bytes:
    """Return the token of a run that has one.

    Raises:
        OSError: there is none, or it cannot be read.
        UnsafeError: the file holds no token, or users other than its owner could have read or written it.
    """
    path = Path(run_dir) / TOKEN_FILE
    try:
        file = open_regular(path, links=False, limit=4096)
    except NotRegularError as error:
        raise UnsafeError(f"{path} {error.strerror}: remove it and start the run again") from None
    with file:
        found, text = os.fstat(file.fileno()), file.read()
    if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
        raise UnsafeError(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):03o}: others could read or "
            "change it. Make it yours alone (chmod 600), or remove it and start the run again"
        )
    try:
        token = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise UnsafeError(f"{path} holds no token of a run: remove it and start the run again")
    return token


def require_own(run_dir: Path) -> None:
    """Refuse a run directory that other users can write to, because commands act on what its files say. From then on,
    this process and those that it starts make nothing that others can write to, whatever the umask was.

    Raises:
        UnsafeError: another user than this one or root owns it or a folder of FOLDERS in it, or others may write to it.
    """
    os.umask(os.umask(0o022) | 0o022)  # for checkpoints, too, which torch writes
    for folder in (run_dir, *filter(Path.exists, (run_dir / name for name in FOLDERS))):
        found = os.stat(folder)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (os.geteuid(), 0):
            raise UnsafeError(
                f"{folder} belongs to user {found.st_uid}, and commands act on what the files in it say: copy it and "
                "work on the copy, or act as that user"
            )
        # On many systems each user has a group with the user's id and no other member: it lets nobody else in.
        own_group = found.st_gid == found.st_uid
        if mode & 0o002 or (mode & 0o020 and not own_group):
            raise UnsafeError(f"other users can write to {folder} (mode {mode:03o}): chmod -R go-w {run_dir}")


def require_run(run_dir: Path) -> None:
    """Check that `run_dir` holds a run that a command may act on. Raises LaunchError if there is no run, and
    UnsafeError like `require_own`."""
    require_events(run_dir)
    require_own(run_dir)
    if not any(map(Path.exists, (run_dir / TOKEN_FILE, config_file(run_dir)))):
        raise LaunchError(f"{run_dir} is not a run directory: it has neither {TOKEN_FILE} nor config.toml.")
