"""Shuffling without a table: a keyed permutation of 0 … size-1 in constant memory.

A balanced Feistel network is a bijection of [0, 4^h) for any round function (Luby and Rackoff, SIAM J. Comput. 17(2),
1988). If the result for an index is outside the range, the network is applied again until it is inside. That makes it a
bijection of the range (cycle walking: Black and Rogaway, CT-RSA 2002). The network's domain is at most four times the
range, so an index takes at most four passes on average."""

import hashlib
from collections.abc import Callable

_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """Return SplitMix64's finalizer of a 64-bit value, in which every input bit affects every output bit (Steele, Lea
    and Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def permutation(size: int, seed: int, epoch: int) -> Callable[[int], int]:
    """Return a permutation of range(size) as a function of an index. It depends on the arguments only, so it is equal
    on every machine. Raises ValueError if size is less than 1."""
    if size < 1:
        raise ValueError(f"a permutation needs at least one element, got size {size}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = [int.from_bytes(key[i : i + 8], "little") for i in range(0, len(key), 8)]

    def network(value: int) -> int:
        left, right = value >> half, value & mask
        for key in keys:
            left, right = right, left ^ (_mix((right + key) & _MASK_64) & mask)
        return left << half | right

    def permuted(index: int) -> int:
        if not 0 <= index < size:
            raise IndexError(f"index {index} is outside 0 to {size - 1}")
        index = network(index)
        while index >= size:
            index = network(index)
        return index

    return permuted
