"""The erasure code: its arithmetic, and which member holds which shards of a coded snapshot.

The arithmetic is RAID-6's: over k data shards d_0 … d_{k-1} of equal length, P = Σ d_c and Q = Σ 2^c d_c in GF(2^8)
with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d). Any two lost shards, data or parity, can be recomputed for
k <= 255 (H. P. Anvin, "The mathematics of RAID-6"). A single parity shard is P, a plain XOR. The arithmetic is done
with NumPy integers and no other library.

The shards are placed by RAIM5's rotation (REFT, arXiv 2310.12670), for one parity shard or two. Each member of a parity
group holds its own part and parity over the other members' parts. With n members there are n stripes, and member
(s + j) mod n holds parity row j of stripe s. Each member that holds none of a stripe's m rows gives one shard of its
payload to the stripe, so a payload is cut into n - m shards. No member holds both a shard and parity over that shard,
and each stores and codes the same amount of parity: m / (n - m) of a payload.
"""

import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from everstep.snapshot.buffer import CHUNK_BYTES

POLYNOMIAL = 0x11D
_TILE_BYTES = 128 << 10
_HIGH, _ONE, _SEVEN = np.uint64(0x8080808080808080), np.uint64(1), np.uint64(7)
_REDUCTION = np.uint64(POLYNOMIAL & 0xFF)


def gf_multiply(a: int, b: int) -> int:
    """Return the product of two elements of GF(2^8)."""
    product = 0
    while b:
        product ^= a * (b & 1)
        a, b = a << 1 ^ POLYNOMIAL * (a >> 7), b >> 1
    return product


def encoding_rows(data: int, parity: int) -> list[list[int]]:
    """Return the parity shards' coefficients: `parity` rows (at most 2) of `data` field elements (at most 255)."""
    powers = itertools.accumulate([2] * (data - 1), gf_multiply, initial=1)
    return [[1] * data, list(powers)][:parity]


def decoding_rows(data: int, parity: int, lost: Sequence[int], have: Sequence[int]) -> list[list[int]]:
    """Return the coefficients that give the `lost` data shards from the first `data` shards of `have`. Numbers 0 …
    data-1 are data shards, higher ones are parity shards."""
    return [_inverse(data, parity, tuple(have[:data]))[index] for index in lost]


@functools.lru_cache(1024)
def _inverse(data: int, parity: int, have: tuple[int, ...]) -> list[list[int]]:
    """Return the inverse of the code's rows for the shards `have`, by Gauss-Jordan elimination over the field. The rows
    are regular for every choice of shards. Cached: a start decodes a few patterns for thousands of stripes."""
    code = [[int(r == c) for c in range(data)] for r in range(data)] + encoding_rows(data, parity)
    rows = [code[index] + [int(i == j) for j in range(data)] for i, index in enumerate(have)]
    for column in range(data):
        pivot = next(i for i in range(column, data) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = functools.reduce(gf_multiply, [rows[column][column]] * 254)  # its inverse, as a^255 is 1
        rows[column] = [gf_multiply(scale, x) for x in rows[column]]
        for i in range(data):
            if i != column and (factor := rows[i][column]):
                rows[i] = [x ^ gf_multiply(factor, y) for x, y in zip(rows[i], rows[column], strict=True)]
    return [row[data:] for row in rows]


def combine(rows: Sequence[Sequence[int]], shards: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
    """Compute out[r] = Σ_c rows[r][c] · shards[c]. `encoding_rows` give parity this way, and `decoding_rows` the lost
    shards. All arrays are contiguous uint8 [length], of one length, a multiple of 8. No row may be all zeros.

    It uses Horner's rule over the coefficients' bits: Σ_c f_c · d_c = Σ_b 2^b · (XOR of the d_c whose f_c has bit b),
    from the highest bit down. It works on 64 bits at a time and tile by tile, so that a tile stays in the cache.
    """
    scratch = np.empty(_TILE_BYTES // 8, dtype=np.uint64)
    for start in range(0, len(out[0]), _TILE_BYTES):
        columns = [_words(shard, start) for shard in shards]
        for row, target in zip(rows, out, strict=True):
            total, begun = _words(target, start), False
            for bit in reversed(range(max(row).bit_length())):
                if begun:
                    _double(total, scratch[: len(total)])
                for factor, column in zip(row, columns, strict=True):
                    if factor >> bit & 1:
                        np.bitwise_xor(total, column, out=total) if begun else np.copyto(total, column)
                        begun = True


def _words(array: np.ndarray, start: int) -> np.ndarray:
    """Return a tile of bytes as 64-bit words."""
    return array[start : start + _TILE_BYTES].view(np.uint64)


def _double(words: np.ndarray, scratch: np.ndarray) -> None:
    """Multiply every byte of the words by 2 in the field, in place."""
    np.bitwise_and(words, _HIGH, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.left_shift(words, _ONE, out=words)
    np.right_shift(scratch, _SEVEN, out=scratch)
    np.multiply(scratch, _REDUCTION, out=scratch)
    np.bitwise_xor(words, scratch, out=words)


def aligned_bytes(length: int) -> np.ndarray:
    """Return an uninitialised uint8 array [length] whose memory is aligned to 64 bytes."""
    raw = np.empty(length + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + length]


ALIGNMENT = 64
HOST_BITS, SWITCH_BITS = 20, 10
"""Bits of a host's and of a switch's hash in a location. A host and two switches fit, with the other fields of an
`agreement.Status`, into the 53 bits of the float64 that groups exchange."""
LOCATION_BITS = HOST_BITS + 2 * SWITCH_BITS


def location_of(environment: Mapping[str, str], host: str) -> int:
    """Return the location of a rank's host as a number; hosts on one switch sort together. From the lowest bit up, it
    holds hashes of the host, of its switch (or block), and of the switch above that.

    On a cluster whose Slurm knows its topology, SLURM_TOPOLOGY_ADDR is the path to the task's node from the topmost
    switch down, such as `s0.s4.s8.node1`, and SLURM_TOPOLOGY_ADDR_PATTERN says what each part is. Elsewhere only the
    host is known. Hosts with equal hashes count as one host.
    """
    path = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if pattern[-1] != "node" or len(path) != len(pattern):  # no topology, or a name with dots in it
        path = [host]
    switches = path[:-1]
    above, switch = _hash(switches[:-1], SWITCH_BITS), _hash(switches, SWITCH_BITS)
    return (above << SWITCH_BITS | switch) << HOST_BITS | _hash(path, HOST_BITS)


def _hash(path: list[str], bits: int) -> int:
    """Return a hash of the path, above 0 and with at most `bits` bits; 0 for an empty path."""
    return zlib.crc32(".".join(path).encode()) % ((1 << bits) - 1) + 1 if path else 0


@dataclass(frozen=True)
class Domains:
    """Which members of a snapshot are coded together. All groups compute the same, from what they told each other."""

    members: tuple[int, ...]
    size: int
    """About how many members a parity group has: at most 1.5 times as many, unless it takes more to exceed `parity`."""
    parity: int
    """Members of a parity group that may be lost: [snapshot] parity."""
    locations: tuple[int, ...]
    """Locations of the members (`location_of`); 0 if unknown, which counts as a separate host."""

    @functools.cached_property
    def hosts(self) -> dict[int, int]:
        """Member -> a number for its host."""
        return {member: place or -1 - member for member, place in zip(self.members, self.locations, strict=True)}

    @functools.cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """The parity groups. At most `parity` members of each are on one host, and members on one switch are spread
        over as many as possible. Members, ordered by location, are dealt out in turn to as many parity groups as that
        takes. If that is many, some may have a single member; otherwise each has more than `parity`."""
        together = max(Counter(self.hosts.values()).values())
        enough = -(-together // self.parity) if self.parity else 1
        wanted, most = round(len(self.members) / self.size), len(self.members) // (self.parity + 1)
        count = max(1, min(wanted, most), enough)
        order = sorted(self.members, key=lambda member: (self.hosts[member], member))
        return [tuple(sorted(order[first::count])) for first in range(min(count, len(order)))]

    def group_of(self, member: int) -> tuple[int, ...]:
        """Return the parity group of a member."""
        return next(group for group in self.groups if member in group)

    def rows(self, group: Sequence[int]) -> int:
        """Return the parity shards per stripe of a parity group; 0 if all its members are on one host."""
        alone = len({self.hosts[member] for member in group}) == 1
        return 0 if alone else min(self.parity, len(group) - 1)

    @functools.cached_property
    def exposed(self) -> tuple[int, ...]:
        """The members on hosts whose loss the snapshot does not survive."""
        lost = set()
        for group in self.groups:
            there = Counter(self.hosts[member] for member in group)
            lost |= {host for host, count in there.items() if count > self.rows(group)}
        return tuple(member for member in self.members if self.hosts[member] in lost)

    @property
    def survives(self) -> int:
        """How many hosts may be lost at once, whichever they are, not counting exposed hosts."""
        found = []
        for group in self.groups:
            safe = Counter(self.hosts[member] for member in group if member not in self.exposed)
            lost = itertools.accumulate(sorted(safe.values(), reverse=True))  # hosts with most members first
            found += [sum(count <= self.rows(group) for count in lost)] if safe else []
        return min(found, default=0)


@dataclass(frozen=True)
class Code:
    """How the payloads of a parity group are coded."""

    members: tuple[int, ...]
    """The parity group, in ascending order."""
    parity: int
    """Parity rows of a stripe, 1 or 2; fewer than there are members."""

    def rows(self, stripe: int) -> tuple[int, ...]:
        """Return the holders of a stripe's parity, by row."""
        return tuple(self.members[(stripe + row) % len(self.members)] for row in range(self.parity))

    def columns(self, stripe: int) -> tuple[int, ...]:
        """Return the members that give a stripe's shards, by column."""
        rows = self.rows(stripe)
        return tuple(member for member in self.members if member not in rows)

    @functools.cache  # noqa: B019 - a handful of small codes
    def stripes_of(self, giver: int) -> tuple[int, ...]:
        """Return the stripes that a giver's 0th, 1st, … shard go to."""
        return tuple(stripe for stripe in range(len(self.members)) if giver not in self.rows(stripe))

    def stripe_coded_by(self, holder: int, row: int) -> int:
        """Return the stripe whose parity row `row` this holder has."""
        return (self.members.index(holder) - row) % len(self.members)

    def shard_bytes(self, payload_bytes: Sequence[int]) -> int:
        """Return the length of a shard for payloads of these sizes: whole chunks of the checksum tables, so that the
        reader of a shard can verify it, or less if no payload exceeds a chunk. Payloads are padded with zeros."""
        longest = max(payload_bytes)
        if longest <= CHUNK_BYTES:
            return -(-longest // ALIGNMENT) * ALIGNMENT
        return -(-longest // ((len(self.members) - self.parity) * CHUNK_BYTES)) * CHUNK_BYTES

    def lacks(self, missing: frozenset[int], parity_there: frozenset[int]) -> str:
        """Return why the payloads of `missing` members cannot be decoded from the other payloads and the parity of
        members in `parity_there`; "" if they can."""
        for stripe in range(len(self.members)):
            lost = sum(giver in missing for giver in self.columns(stripe))
            rows = sum(holder in parity_there for holder in self.rows(stripe))
            if lost > rows:
                return f"{rows} of {self.parity} parity shards are left for {lost} lost parts"
        return ""


def part_bounds(state_bytes: int, members: int, index: int) -> tuple[int, int]:
    """Return begin and end of the part of the member at `index`. Parts are contiguous, aligned and nearly equal."""
    units = -(-state_bytes // ALIGNMENT)
    begin, end = (units * i // members * ALIGNMENT for i in (index, index + 1))
    return min(begin, state_bytes), min(end, state_bytes)
