"""The run's token: a secret in the run directory that only its owner reads; it admits processes to the run."""

import os
import secrets
import shutil
import stat
from pathlib import Path

from everstep.run.directory import LaunchError, make_run_dir, require_events
from everstep.run.files import read_json, write_first, write_json
from everstep.run.regular import NotRegularError, open_regular

TOKEN_FILE = "token"
TOKEN_BYTES = 32
HOME_FILE = ".token-home"
"""Which directory the token was made for, as JSON."""


class UnsafeError(LaunchError, ValueError):
    """Others could know or change what the run acts on, or there is no token in the token's place."""


def run_token(run_dir: Path) -> bytes:
    """The token of a run, made by whoever asks first.

    Raises:
        UnsafeError: the file is there but holds no token, or others than its owner could have written or read it; or
            others could have written to the run directory.
    """
    path = Path(run_dir) / TOKEN_FILE
    make_run_dir(path.parent)
    require_own(path.parent)
    write_first(path, (secrets.token_hex(TOKEN_BYTES) + "\n").encode(), mode=0o600)
    return read_token(run_dir)


def own_token(run_dir: Path) -> bytes:
    """As `run_token`, for whoever starts a run alone. A directory that was copied from a run's which is still in its
    place gets a token of its own: it is another run, with other snapshots and keepers.

    Raises as `run_token`.
    """
    token, here = run_token(run_dir), run_dir.resolve()
    home = run_dir / HOME_FILE
    before = Path(read_json(home).get("run_dir") or here)
    if before != here and _is_of(before, token) and not before.samefile(here):
        (run_dir / TOKEN_FILE).unlink()
        shutil.rmtree(run_dir / "state" / "keepers", ignore_errors=True)
        token = run_token(run_dir)
    write_json(home, {"run_dir": str(here)})
    return token


def _is_of(run_dir: Path, token: bytes) -> bool:
    try:
        return read_token(run_dir) == token
    except (OSError, UnsafeError):
        return False


def read_token(run_dir: Path) -> bytes:
    """The token of a run that has one.

    Raises:
        OSError: there is none, or it cannot be read.
        UnsafeError: as `run_token`.
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
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):03o}: others could know or "
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
    """Believe only a run directory that nobody else can write to: what stands in it is acted on.

    Raises:
        UnsafeError: another user owns it, or others may write to it.
    """
    found = os.stat(run_dir)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.geteuid(), 0):
        raise UnsafeError(
            f"{run_dir} belongs to user {found.st_uid}, and what stands in a run directory is acted on: copy it and "
            "work on the copy, or act as that user"
        )
    # A group of one's own is common as the group of one's files; with it, others are not let in.
    own_group = found.st_gid == found.st_uid
    if mode & 0o002 or (mode & 0o020 and not own_group):
        raise UnsafeError(f"{run_dir} can be written to by others (mode {mode:03o}): chmod go-w {run_dir}")


def require_run(run_dir: Path) -> None:
    """For commands that act on a run which is there.

    Raises:
        LaunchError: there is none.
        UnsafeError: as `require_own`.
    """
    require_events(run_dir)
    require_own(run_dir)
