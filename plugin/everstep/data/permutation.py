"""Shuffling without a table: a keyed permutation of 0 … size-1 in constant memory.

A balanced Feistel network is a bijection of [0, 4^h) whatever its round function is (Luby and Rackoff, SIAM
J. Comput. 17(2), 1988). Indices that fall outside the range are sent through it again until they fall inside,
which keeps it a bijection of the range (cycle walking: Black and Rogaway, CT-RSA 2002). The network's domain
is less than four times the range, so fewer than four passes are expected."""

import hashlib

_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's finalizer: 64 bits in which every input bit moves every output bit (Steele, Lea and Flood,
    OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


class Permutation:
    """A permutation of range(size), the same for the same (size, seed, epoch) everywhere."""

    def __init__(self, size: int, seed: int, epoch: int):
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got size {size}")
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(key[i : i + 8], "little") for i in range(0, len(key), 8)]

    def __call__(self, index: int) -> int:
        """Where `index` goes. Raises IndexError outside range(size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside 0 to {self.size - 1}")
        index = self._network(index)
        while index >= self.size:
            index = self._network(index)
        return index

    def _network(self, value: int) -> int:
        half, mask = self._half_bits, (1 << self._half_bits) - 1
        left, right = value >> half, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix((right + key) & _MASK_64) & mask)
        return left << half | right
