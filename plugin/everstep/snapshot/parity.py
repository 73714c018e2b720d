"""Erasure codes over bytes: XOR for one loss, Reed-Solomon for two.

The code is RAID-6's: over k data shards d_0 … d_{k-1} of equal length, P = Σ d_c and Q = Σ 2^c d_c in GF(2^8)
with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), the field of Intel's ISA-L. Any two lost shards, data
or parity, can be recomputed for k <= 255 (H. P. Anvin, "The mathematics of RAID-6"). One parity shard is P
alone: plain XOR.

ISA-L computes it where its shared library is installed (Debian: libisal2), NumPy otherwise; the bytes are equal.
"""

import ctypes
import ctypes.util
import functools
from collections.abc import Sequence

import numpy as np

POLYNOMIAL = 0x11D
MAX_PARITY = 2
MAX_DATA = 255
_TILE_BYTES = 64 << 10  # NumPy: sources, destination and scratch stay in the second-level cache


class ParityError(ValueError):
    """Shards from which the missing ones cannot be recomputed."""


@functools.cache
def _field() -> tuple[np.ndarray, np.ndarray]:
    """Exponentials (510 of them, so that sums of two logarithms need no modulo) and logarithms of the
    field."""
    exp, log = np.zeros(510, dtype=np.uint8), np.zeros(256, dtype=np.int64)
    value = 1
    for power in range(255):
        exp[power] = exp[power + 255] = value
        log[value] = power
        value <<= 1
        if value & 0x100:
            value ^= POLYNOMIAL
    return exp, log


def gf_multiply(a: int, b: int) -> int:
    exp, log = _field()
    return int(exp[log[a] + log[b]]) if a and b else 0


def gf_inverse(a: int) -> int:
    if not a:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    exp, log = _field()
    return int(exp[255 - log[a]])


def encoding_rows(data: int, parity: int) -> list[list[int]]:
    """Coefficients of the parity shards: `parity` rows of `data` field elements."""
    if not 1 <= data <= MAX_DATA or not 0 <= parity <= MAX_PARITY:
        raise ParityError(f"there is no code here for {data} data and {parity} parity shards")
    exp, _ = _field()
    return [[1] * data, [int(exp[c]) for c in range(data)]][:parity]


def decoding_rows(data: int, parity: int, lost: Sequence[int], have: Sequence[int]) -> list[list[int]]:
    """Coefficients that give the `lost` data shards from the shards `have` (0 … data-1 are data, then
    parity).

    Raises ParityError unless `have` holds at least `data` shards; the first `data` of them are used.
    """
    if len(have) < data:
        raise ParityError(f"{data} shards are needed and {len(have)} are there")
    return [_inverse(data, parity, tuple(have[:data]))[index] for index in lost]


@functools.lru_cache(1024)
def _inverse(data: int, parity: int, have: tuple[int, ...]) -> list[list[int]]:
    """A start decodes the same few patterns for thousands of stripes."""
    code = [[int(r == c) for c in range(data)] for r in range(data)] + encoding_rows(data, parity)
    return _inverted([code[index] for index in have])


def _inverted(matrix: list[list[int]]) -> list[list[int]]:
    """Gauss-Jordan over the field. The matrix is regular for every choice of rows that callers can make."""
    n = len(matrix)
    rows = [list(row) + [int(i == j) for j in range(n)] for i, row in enumerate(matrix)]
    for column in range(n):
        pivot = next(i for i in range(column, n) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = gf_inverse(rows[column][column])
        rows[column] = [gf_multiply(scale, x) for x in rows[column]]
        for i in range(n):
            if i != column and (factor := rows[i][column]):
                rows[i] = [x ^ gf_multiply(factor, y) for x, y in zip(rows[i], rows[column], strict=True)]
    return [row[n:] for row in rows]


def combine(rows: Sequence[Sequence[int]], shards: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
    """out[r] = Σ_c rows[r][c] · shards[c], for uint8 arrays [length], contiguous and all of one length."""
    length = out[0].nbytes
    if any(array.nbytes != length or array.dtype != np.uint8 for array in (*shards, *out)):
        raise ParityError("shards must be byte arrays of one length")
    library = isal()
    if library is not None and length >= 64:
        library.combine(rows, shards, out)
    else:
        combine_numpy(rows, shards, out)


def combine_numpy(rows: Sequence[Sequence[int]], shards: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
    """`combine` without a library: Horner's rule over the coefficients' bits.

    Σ_c f_c · d_c is Σ_b 2^b · (the XOR of those d_c whose f_c has bit b), from the highest bit on: at most seven
    doublings for a row, however many shards it has, and plain XOR between them.
    """
    length = out[0].nbytes
    carries = np.empty(min(_TILE_BYTES, length), dtype=np.uint8)
    for start in range(0, length, _TILE_BYTES):
        tile = slice(start, min(start + _TILE_BYTES, length))
        for row, target in zip(rows, out, strict=True):
            total, begun = target[tile], False
            for bit in reversed(range(max(row).bit_length())):
                if begun:
                    _double(total, carries[: len(total)])
                for shard in (s for factor, s in zip(row, shards, strict=True) if factor >> bit & 1):
                    if begun:
                        np.bitwise_xor(total, shard[tile], out=total)
                    else:
                        total[:] = shard[tile]
                        begun = True
            if not begun:
                total[:] = 0


def _double(elements: np.ndarray, carries: np.ndarray) -> None:
    """Multiply bytes by 2 in the field, in place. `carries`: scratch of the same length."""
    np.less(elements.view(np.int8), 0, out=carries.view(bool))  # 1 where the highest bit is set; faster than a shift
    np.multiply(carries, np.uint8(POLYNOMIAL & 0xFF), out=carries)
    np.add(elements, elements, out=elements)
    np.bitwise_xor(elements, carries, out=elements)


class _Isal:
    """ISA-L through ctypes, which lets go of the interpreter lock during a call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode, self._tables = library.ec_encode_data, library.ec_init_tables
        self._xor = library.xor_gen

    def combine(self, rows: Sequence[Sequence[int]], shards: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
        k, length = len(shards), out[0].nbytes
        if len(rows) == 1 and all(factor == 1 for factor in rows[0]) and self._can_xor(shards, out[0]):
            places = (ctypes.c_void_p * (k + 1))(*(s.ctypes.data for s in shards), out[0].ctypes.data)
            if self._xor(k + 1, length, places):
                raise ParityError(f"ISA-L's xor_gen refused {k} shards of {length} bytes")
            return
        # All rows at once: the shards are read once.
        matrix = (ctypes.c_ubyte * (k * len(rows)))(*(factor for row in rows for factor in row))
        tables = (ctypes.c_ubyte * (32 * k * len(rows)))()
        self._tables(k, len(rows), matrix, tables)
        sources = (ctypes.c_void_p * k)(*(s.ctypes.data for s in shards))
        targets = (ctypes.c_void_p * len(rows))(*(target.ctypes.data for target in out))
        self._encode(length, k, len(rows), tables, sources, targets)

    def _can_xor(self, shards: Sequence[np.ndarray], target: np.ndarray) -> bool:
        # xor_gen wants two sources or more and memory aligned to 32 bytes.
        return len(shards) > 1 and all(array.ctypes.data % 32 == 0 for array in (*shards, target))


@functools.cache
def isal() -> _Isal | None:
    """ISA-L, if this host has it."""
    for name in ("libisal.so.2", ctypes.util.find_library("isal")):
        if name is None:
            continue
        try:
            return _Isal(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue  # absent, or built without these functions
    return None


def aligned_bytes(length: int) -> np.ndarray:
    """An uninitialised uint8 array [length] whose memory is aligned to 64 bytes."""
    raw = np.empty(length + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + length]
