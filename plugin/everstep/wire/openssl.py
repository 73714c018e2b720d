"""AES-128-GCM by the OpenSSL of the package `cryptography`, during which other threads run from version 50 on."""

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag  # pyrefly: ignore[missing-import]
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # pyrefly: ignore[missing-import]

from everstep.wire.nonces import TAG_BYTES, SealError, nonce


class Gcm:
    """A `Sealer` (`everstep.wire.sealing`) for one direction and key."""

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
        return modes.GCM(nonce(self._count - 1), min_tag_length=TAG_BYTES)
