"""Encryption of a channel's records: AES-128-GCM (NIST SP 800-38D) with the number of the record as its 96-bit nonce.

OpenSSL is the one that the package `cryptography` brings along. A system's own may be older than 3.1, which does not
use AVX-512 for GCM and is three times as slow; TLS of the standard library uses that one, and moves half as much.
"""

import struct
from collections.abc import Sequence

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES, TAG_BYTES = 32, 16
_NONCE = struct.Struct("<Q4x")


class Sealer:
    """Seals or opens the records of one direction of one channel, in their order: one that is left out, repeated,
    exchanged with another or sent back where it came from does not open.

    Args:
        key: KEY_BYTES bytes that no other direction or channel ever had.
    """

    def __init__(self, key: bytes) -> None:
        self._aes, self._count = AESGCM(key[:16]), 0

    def seal(self, head: bytes, views: Sequence[memoryview]) -> bytearray:
        """What to send for these bytes: `head`, and TAG_BYTES more than they are."""
        body = views[0] if len(views) == 1 else b"".join(views)
        record = bytearray(len(head) + len(body) + TAG_BYTES)
        record[: len(head)] = head
        self._aes.encrypt_into(self._nonce(), body, head, memoryview(record)[len(head) :])
        return record

    def open(self, head: bytes, sealed: memoryview, into: Sequence[memoryview]) -> None:
        """Put what was sealed into these buffers, which it fills. Raises cryptography.exceptions.InvalidTag; what the
        buffers hold then is not to be used."""
        if len(into) == 1:
            self._aes.decrypt_into(self._nonce(), sealed, head, into[0])
            return
        body = memoryview(self._aes.decrypt(self._nonce(), sealed, head))
        for view in into:
            view[:], body = body[: view.nbytes], body[view.nbytes :]

    def _nonce(self) -> bytes:
        self._count += 1
        return _NONCE.pack(self._count - 1)
