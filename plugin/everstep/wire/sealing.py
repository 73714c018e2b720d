"""Message authentication and encryption of a channel: AES-128-GCM.

A `Sealer` belongs to one direction of one channel and to a key that was never used before. Each message is sealed with
the number of the messages before it, so that one which is left out, repeated, exchanged with another or sent back where
it came from does not open. GCM follows NIST SP 800-38D with the counter as its 96-bit nonce; a message of which all is
only authenticated is what that standard calls GMAC.

OpenSSL is the one that the package `cryptography` brings along, during which other threads run. A system's own may be
older than 3.1, which does not use AVX-512 for GCM and is three times as slow.
"""

import enum
import struct
from collections.abc import Callable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    AEADEncryptionContext,
    Cipher,
    algorithms,
    modes,
)

KEY_BYTES, TAG_BYTES = 32, 16
_COUNTER = struct.Struct("<Q4x")


class SealError(ValueError):
    """A message that is not what the other side sealed."""


class Suite(enum.IntFlag):
    """How messages are sealed. A peer offers several, one is chosen."""

    GMAC = 2
    GCM = 4


class Sealing:
    """A message on its way out."""

    def __init__(self, context: AEADEncryptionContext, room: Callable[[int], memoryview] | None) -> None:
        self._context, self._room = context, room

    def update(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """What to send for the next bytes of the body; good until the next call."""
        if self._room is None:
            for view in views:
                self._context.authenticate_additional_data(view)
            return views
        sealed, at = self._room(sum(view.nbytes for view in views)), 0
        for view in views:
            at += self._context.update_into(view, sealed[at:])
        return [sealed]

    def tag(self) -> bytes:
        """What to send after the body: TAG_BYTES."""
        self._context.finalize()
        return self._context.tag


class Opening:
    """A message on its way in. Nothing of it is to be believed before `check`."""

    def __init__(self, context: AEADDecryptionContext, encrypted: bool) -> None:
        self._context, self._encrypted = context, encrypted

    def update(self, views: Sequence[memoryview]) -> None:
        """Take in the next bytes of the body, and decrypt them in place."""
        for view in views:
            if self._encrypted:
                self._context.update_into(view, view)
            else:
                self._context.authenticate_additional_data(view)

    def check(self, tag: bytes) -> None:
        """Raises SealError if this is not the message that was sealed."""
        try:
            self._context.finalize_with_tag(tag)
        except InvalidTag:
            raise SealError("it does not match its authentication code") from None


class Sealer:
    """Seals or opens the messages of one direction of one channel.

    Args:
        key: KEY_BYTES bytes, of this direction of this channel alone.
        suite: how.
    """

    def __init__(self, key: bytes, suite: Suite) -> None:
        self._encrypts = suite == Suite.GCM
        self._aes, self._count = algorithms.AES(key[:16]), 0
        self._buffer = memoryview(b"")

    def seal(self, head: bytes) -> Sealing:
        """Begin the next message to be sent. `head` is sent as it is."""
        context = Cipher(self._aes, self._mode()).encryptor()
        context.authenticate_additional_data(head)
        return Sealing(context, self._room if self._encrypts else None)

    def open(self, head: bytes) -> Opening:
        """Begin the next message that comes."""
        context = Cipher(self._aes, self._mode()).decryptor()
        context.authenticate_additional_data(head)
        return Opening(context, self._encrypts)

    def _room(self, size: int) -> memoryview:
        if size > self._buffer.nbytes:
            self._buffer = memoryview(bytearray(size))
        return self._buffer[:size]

    def _mode(self) -> modes.GCM:
        self._count += 1
        return modes.GCM(_COUNTER.pack(self._count - 1), min_tag_length=TAG_BYTES)


def suites(encrypt: bool | None) -> Suite:
    """What this process may do. With `encrypt`, nothing that sends in the clear; None: what the other side wants."""
    return Suite.GMAC | Suite.GCM if encrypt is None else Suite.GCM if encrypt else Suite.GMAC


def choose(offered: Suite, able: Suite) -> Suite | None:
    """The suite to use, encrypted if both sides can; None if they have none in common."""
    common = offered & able
    return next((suite for suite in (Suite.GCM, Suite.GMAC) if suite & common), None)
