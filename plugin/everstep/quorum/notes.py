"""What members tell each other by collectives of Gloo, which carry equally much of each and authenticate nobody.

What groups tell each other carries a code made with the run's token.
"""

import hashlib
import hmac
import logging
from collections.abc import Callable

CODE_BYTES = 16
LENGTH, SHORT = 8, 512
"""Bytes that say how long something is, and how many one collective carries, those included: what is longer takes a
second one."""

logger = logging.getLogger(__name__)


def gather(mine: bytes, exchange: Callable[[bytes, int], list[bytes]]) -> list[bytes]:
    """What each member gave, however long.

    Args:
        exchange: a collective, which returns what each gave and what lies behind it, so many bytes at least.
    """
    mine = len(mine).to_bytes(LENGTH, "little") + mine
    said = exchange(mine[:SHORT], SHORT)
    sizes = [LENGTH + int.from_bytes(each[:LENGTH], "little") for each in said]
    if max(sizes) > SHORT:
        said = exchange(mine, max(sizes))
    return [each[LENGTH:size] for each, size in zip(said, sizes, strict=True)]


def _code(token: bytes, place: bytes, note: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(8, "little") + part for part in (b"note", place, note))
    return hmac.digest(token, text, hashlib.sha256)[:CODE_BYTES]


def seal_note(token: bytes, place: bytes, note: bytes) -> bytes:
    """`note` with a code in front that says that a member of this run wrote it for `place`. An empty note stays
    empty."""
    return _code(token, place, note) + note if note else b""


def open_note(token: bytes, place: bytes, sealed: bytes) -> bytes:
    """What `seal_note` was given; empty, with a warning, if it was anything else."""
    code, note = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
    if not sealed or hmac.compare_digest(_code(token, place, note), code):
        return note
    logger.warning(
        "a note of %d bytes was not written by the group that it came from: look for strangers on the network that "
        "carries the sums",
        len(sealed),
    )
    return b""
