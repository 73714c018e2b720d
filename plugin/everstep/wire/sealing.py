"""Encryption of a channel's records: AES-128-GCM (NIST SP 800-38D) with the number of the record as its 96-bit nonce.

It uses the OpenSSL that the package `cryptography` contains. The system's OpenSSL may be older than 3.1; such versions
do not use AVX-512 for GCM and are three times as slow. The standard library's TLS uses the system's OpenSSL, and moves
half as much.
"""

import struct
from collections.abc import Sequence

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES, TAG_BYTES = 32, 16
_NONCE = struct.Struct("<Q4x")


class Sealer:
    """Seals or opens the records of one direction of one channel, in order. Opening fails if a record was dropped,
    repeated, swapped with another, or sent back to its sender.

    Args:
        key: KEY_BYTES bytes that no other direction or channel has ever used. AES-128 uses the first 16.
    """

    def __init__(self, key: bytes) -> None:
        self._aes, self._count = AESGCM(key[:16]), 0

    def seal(self, head: bytes, views: Sequence[memoryview]) -> bytearray:
        """Return the record to send: `head`, then the encrypted bytes of `views` and a tag of TAG_BYTES."""
        body = views[0] if len(views) == 1 else b"".join(views)
        record = bytearray(len(head) + len(body) + TAG_BYTES)
        record[: len(head)] = head
        self._aes.encrypt_into(self._nonce(), body, head, memoryview(record)[len(head) :])
        return record

    def open(self, head: bytes, sealed: memoryview, into: Sequence[memoryview]) -> None:
        """Decrypt a record into these buffers, which together have its size. Raises cryptography.exceptions.InvalidTag
        if it does not open; the content of the buffers must then not be used."""
        if len(into) == 1:
            self._aes.decrypt_into(self._nonce(), sealed, head, into[0])
            return
        body = memoryview(self._aes.decrypt(self._nonce(), sealed, head))
        for view in into:
            view[:], body = body[: view.nbytes], body[view.nbytes :]

    def _nonce(self) -> bytes:
        self._count += 1
        return _NONCE.pack(self._count - 1)
