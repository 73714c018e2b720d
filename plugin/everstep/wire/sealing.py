"""Message authentication and encryption of a channel: AES-128-GCM.

A `Sealer` belongs to one direction of one channel and to a key that was never used before. Each message is sealed with
the number of the messages before it, so that one which is left out, repeated, exchanged with another or sent back where
it came from does not open. GCM follows NIST SP 800-38D with the counter as its 96-bit nonce; a message of which all is
only authenticated is what that standard calls GMAC.

OpenSSL is the one that the package `cryptography` brings along, or else the system's libcrypto. Versions before 3.1 do
not use AVX-512 for GCM, and are three times as slow where there is AVX-512.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

from everstep.wire import libcrypto
from everstep.wire.nonces import TAG_BYTES as TAG_BYTES
from everstep.wire.nonces import SealError

try:
    from everstep.wire.openssl import Gcm
except ImportError:
    Gcm = libcrypto.Gcm

KEY_BYTES = 32


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


def suites(encrypt: bool | None) -> Suite:
    """What this process can do. With `encrypt`, nothing that sends in the clear; None: whichever the other side wants.

    Raises:
        SealError: there is no OpenSSL.
    """
    if Gcm is libcrypto.Gcm and libcrypto.library() is None:
        raise SealError("messages are sealed with OpenSSL, which is not found here: `pip install cryptography`")
    return Suite.GMAC | Suite.GCM if encrypt is None else Suite.GCM if encrypt else Suite.GMAC


def choose(offered: Suite, able: Suite) -> Suite | None:
    """The fastest suite that both sides take; None if there is none."""
    common = offered & able
    return next((suite for suite in (Suite.GCM, Suite.GMAC) if suite & common), None)


def sealer(suite: Suite, key: bytes) -> Sealer:
    """A sealer for one direction. `key`: KEY_BYTES bytes of this direction of this channel alone."""
    return Gcm(key, encrypts=suite == Suite.GCM)
