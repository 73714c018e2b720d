"""Notes between groups that go over Gloo, which authenticates nobody: each carries a code made with the run's token."""

import hashlib
import hmac

CODE_BYTES = 16


class StrangerError(ValueError):
    """Something that claims to come from this run and does not; in one sentence, with what to do."""


def _code(token: bytes, place: bytes, note: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(8, "little") + part for part in (b"note", place, note))
    return hmac.digest(token, text, hashlib.sha256)[:CODE_BYTES]


def seal_note(token: bytes, place: bytes, note: bytes) -> bytes:
    """`note` with a code in front that says that a member of this run wrote it for `place`. An empty note stays
    empty."""
    return _code(token, place, note) + note if note else b""


def open_note(token: bytes, place: bytes, sealed: bytes) -> bytes:
    """What `seal_note` was given. Raises StrangerError if it was anything else."""
    if not sealed:
        return b""
    code, note = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
    if not hmac.compare_digest(_code(token, place, note), code):
        raise StrangerError(
            f"a note of {len(sealed)} bytes was not written by the group that it came from: look for strangers on the "
            "network that carries the sums"
        )
    return note
