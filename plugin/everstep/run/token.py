"""The run's token: a secret in the run directory that only its owner reads; it admits peers to state transfers."""

import os
import secrets
from pathlib import Path

TOKEN_FILE = "token"
TOKEN_BYTES = 32


def run_token(run_dir: Path) -> bytes:
    """The token of a run, made by whoever asks first.

    Raises:
        ValueError: the file is there but holds no token.
    """
    path = Path(run_dir) / TOKEN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f".{TOKEN_FILE}-{os.getpid()}-{secrets.token_hex(4)}")
        draft.touch(mode=0o600, exist_ok=False)
        draft.write_text(secrets.token_hex(TOKEN_BYTES) + "\n")
        try:
            # Unlike a rename, a link never replaces the token that another process made meanwhile.
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    text = path.read_text().strip()
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"{path} holds no token of a run: remove it and start the run again")
    return token
