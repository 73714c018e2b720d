"""AES-128-GCM by the system's OpenSSL, where the package `cryptography` is not installed."""

import ctypes
import ctypes.util
import functools
from collections.abc import Sequence

import numpy as np

from everstep.wire.nonces import TAG_BYTES, SealError, nonce

_GET_TAG, _SET_TAG = 0x10, 0x11  # EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG of openssl/evp.h
_PIECE_BYTES = 1 << 30  # OpenSSL counts in int


class Gcm:
    """A `Sealer` (`everstep.wire.sealing`) for one direction and key."""

    def __init__(self, key: bytes, encrypts: bool) -> None:
        lib = library()
        assert lib is not None, "chosen by `suites`"
        self.encrypts = encrypts
        self._lib, self._key, self._count = lib, key[:16], 0
        self._context: int | None = lib.EVP_CIPHER_CTX_new()
        self._direction: bool | None = None
        self._done = ctypes.c_int()
        self._rest = ctypes.create_string_buffer(16)
        self._buffer = np.empty(0, np.uint8)

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._lib.EVP_CIPHER_CTX_free(self._context)
            self._context = None

    def seal(self, head: bytes, body: Sequence[memoryview]) -> tuple[Sequence[memoryview], bytes]:
        self._begin(head, sealing=True)
        if self.encrypts:
            size = sum(view.nbytes for view in body)
            if size > len(self._buffer):
                self._buffer = np.empty(size, np.uint8)
            at = self._buffer.ctypes.data
            for view in body:
                self._update(at, view, sealing=True)
                at += view.nbytes
            body = [memoryview(self._buffer.data)[:size]]
        else:
            for view in body:
                self._update(None, view, sealing=True)
        self._check(self._lib.EVP_EncryptFinal_ex(self._context, self._rest, ctypes.byref(self._done)))
        tag = ctypes.create_string_buffer(TAG_BYTES)
        self._check(self._lib.EVP_CIPHER_CTX_ctrl(self._context, _GET_TAG, TAG_BYTES, tag))
        return body, tag.raw

    def open(self, head: bytes, body: Sequence[memoryview], tag: bytes) -> None:
        self._begin(head, sealing=False)
        for view in body:
            self._update(_address(view) if self.encrypts else None, view, sealing=False)
        expected = ctypes.create_string_buffer(tag, TAG_BYTES)
        self._check(self._lib.EVP_CIPHER_CTX_ctrl(self._context, _SET_TAG, TAG_BYTES, expected))
        if self._lib.EVP_DecryptFinal_ex(self._context, self._rest, ctypes.byref(self._done)) != 1:
            raise SealError("it does not match its authentication code")

    def _begin(self, head: bytes, sealing: bool) -> None:
        start = self._lib.EVP_EncryptInit_ex if sealing else self._lib.EVP_DecryptInit_ex
        if self._direction is None:
            self._check(start(self._context, self._lib.EVP_aes_128_gcm(), None, self._key, None))
        self._direction = sealing
        self._check(start(self._context, None, None, None, nonce(self._count)))
        self._count += 1
        self._update(None, memoryview(head), sealing)

    def _update(self, target: int | None, view: memoryview, sealing: bool) -> None:
        update = self._lib.EVP_EncryptUpdate if sealing else self._lib.EVP_DecryptUpdate
        source, left = _address(view) if view.nbytes else 0, view.nbytes
        while left:
            piece = min(left, _PIECE_BYTES)
            self._check(update(self._context, target, ctypes.byref(self._done), source, piece))
            source, left = source + piece, left - piece
            target = target + piece if target is not None else None

    def _check(self, status: int) -> None:
        if status != 1:
            raise SealError("OpenSSL refused AES-128-GCM")


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@functools.cache
def library() -> ctypes.CDLL | None:
    """OpenSSL's libcrypto with the functions used here declared; None where there is none that has them."""
    try:
        lib = ctypes.CDLL(ctypes.util.find_library("crypto") or "libcrypto.so.3")
        pointer, number = ctypes.c_void_p, ctypes.c_int
        signatures = {
            "EVP_aes_128_gcm": (pointer, []),
            "EVP_CIPHER_CTX_new": (pointer, []),
            "EVP_CIPHER_CTX_free": (None, [pointer]),
            "EVP_CIPHER_CTX_ctrl": (number, [pointer, number, number, pointer]),
            "EVP_EncryptInit_ex": (number, [pointer, pointer, pointer, ctypes.c_char_p, ctypes.c_char_p]),
            "EVP_DecryptInit_ex": (number, [pointer, pointer, pointer, ctypes.c_char_p, ctypes.c_char_p]),
            "EVP_EncryptUpdate": (number, [pointer, pointer, pointer, pointer, number]),
            "EVP_DecryptUpdate": (number, [pointer, pointer, pointer, pointer, number]),
            "EVP_EncryptFinal_ex": (number, [pointer, pointer, pointer]),
            "EVP_DecryptFinal_ex": (number, [pointer, pointer, pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return lib
