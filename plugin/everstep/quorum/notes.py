"""Exchanges byte strings over Gloo's collectives, which take the same size from each member and authenticate nobody.

Notes between groups carry a code made with the run's token.
"""

import hashlib
import hmac
import logging
from collections.abc import Callable

CODE_BYTES = 16
LENGTH, SHORT = 16, 512
"""Bytes of the length in front of a string, which is there twice, and of the first collective, the length included. If
a string is longer, a second collective follows."""

logger = logging.getLogger(__name__)


def gather(mine: bytes, exchange: Callable[[bytes, int], list[bytes]]) -> list[bytes]:
    """Return what each member gave as `mine`, of any length; something else if it was damaged on the way.

    Args:
        exchange: a collective that returns each member's bytes, padded to at least the given size.
    """
    mine = 2 * len(mine).to_bytes(8, "little") + mine
    said = exchange(mine[:SHORT], SHORT)
    # A damaged length must not decide how much memory is allocated.
    sizes = [LENGTH + int.from_bytes(each[:8], "little") if each[:8] == each[8:16] else SHORT for each in said]
    if (longest := max(sizes)) > SHORT:
        said = exchange(mine[:longest], longest)
    return [each[LENGTH:size] for each, size in zip(said, sizes, strict=True)]


def _code(token: bytes, place: bytes, note: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(8, "little") + part for part in (b"note", place, note))
    return hmac.digest(token, text, hashlib.sha256)[:CODE_BYTES]


def seal_note(token: bytes, place: bytes, note: bytes) -> bytes:
    """Return `note` with a code in front, which proves that a member of this run wrote it for `place`. An empty note
    stays empty."""
    return _code(token, place, note) + note if note else b""


def open_note(token: bytes, place: bytes, sealed: bytes) -> bytes:
    """Return the note in what `seal_note` returned for `place`. For anything else, warn and return an empty note."""
    code, note = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
    if not sealed or hmac.compare_digest(_code(token, place, note), code):
        return note
    text = "a note of %d bytes was damaged or written by a stranger: look at the network that carries the sums"
    logger.warning(text, len(sealed))
    return b""
