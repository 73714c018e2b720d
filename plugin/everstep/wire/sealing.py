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
from collections.abc import Sequence
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES, TAG_BYTES = 32, 16
_COUNTER = struct.Struct("<Q4x")


class SealError(ValueError):
    """A message that is not what the other side sealed."""


class Suite(enum.IntFlag):
    """How messages are sealed. A peer offers several, one is chosen."""

    GMAC = 2
    GCM = 4


class Sealer(Protocol):
    encrypts: bool

    def seal(self, head: bytes, body: Sequence[memoryview]) -> tuple[Sequence[memoryview], bytes]:
        """What to send for the next message, whose `head` is sent as it is: the body, and a tag of TAG_BYTES. The
        body is good until the next call."""
        ...

    def open(self, head: bytes, body: Sequence[memoryview], tag: bytes) -> None:
        """Check the next message, and decrypt its body in place. Raises SealError."""
        ...


class Gcm:
    """A `Sealer` of AES-128-GCM."""

    def __init__(self, key: bytes, encrypts: bool) -> None:
        self.encrypts = encrypts
        self._aes, self._count = algorithms.AES(key[:16]), 0
        self._buffer = memoryview(b"")

    def seal(self, head: bytes, body: Sequence[memoryview]) -> tuple[Sequence[memoryview], bytes]:
        context = Cipher(self._aes, self._mode()).encryptor()
        context.authenticate_additional_data(head)
        if self.encrypts:
            size, at = sum(view.nbytes for view in body), 0
            if size > self._buffer.nbytes:
                self._buffer = memoryview(bytearray(size))
            for view in body:
                at += context.update_into(view, self._buffer[at:])
            body = [self._buffer[:size]]
        else:
            for view in body:
                context.authenticate_additional_data(view)
        context.finalize()
        return body, context.tag

    def open(self, head: bytes, body: Sequence[memoryview], tag: bytes) -> None:
        context = Cipher(self._aes, self._mode()).decryptor()
        context.authenticate_additional_data(head)
        for view in body:
            if self.encrypts:
                context.update_into(view, view)
            else:
                context.authenticate_additional_data(view)
        try:
            context.finalize_with_tag(tag)
        except InvalidTag:
            raise SealError("it does not match its authentication code") from None

    def _mode(self) -> modes.GCM:
        self._count += 1
        return modes.GCM(_COUNTER.pack(self._count - 1), min_tag_length=TAG_BYTES)


def suites(encrypt: bool | None) -> Suite:
    """What this process may do. With `encrypt`, nothing that sends in the clear; None: what the other side wants."""
    return Suite.GMAC | Suite.GCM if encrypt is None else Suite.GCM if encrypt else Suite.GMAC


def choose(offered: Suite, able: Suite) -> Suite | None:
    """The fastest suite that both sides take; None if there is none."""
    common = offered & able
    return next((suite for suite in (Suite.GCM, Suite.GMAC) if suite & common), None)


def sealer(suite: Suite, key: bytes) -> Sealer:
    """A sealer for one direction. `key`: KEY_BYTES bytes of this direction of this channel alone."""
    return Gcm(key, encrypts=suite == Suite.GCM)
