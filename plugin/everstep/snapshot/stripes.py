"""Who holds what of a coded snapshot: RAIM5's rotation (REFT, arXiv 2310.12670), for one parity shard or two.

n members, each with a payload, and m parity shards per stripe; k = n - m. There are n stripes. Parity row j
of stripe s lies with member (s + j) mod n; the k other members each give one shard of their payload to it.
Every payload is thus cut into k shards, one for each stripe that its member has no parity of, and every
member holds m parity shards. No member holds both a shard and the parity over it, and all members store and
code equally much: m / k of a payload.

With c = (i - s) mod n - m, member i's c-th shard goes to stripe s, as its c-th column of k. Members are given
by their index in the ascending list of group ids.
"""

from collections.abc import Sequence

ALIGNMENT = 64


def effective_parity(members: int, parity: int) -> int:
    """Parity shards per stripe that this many members allow."""
    return max(0, min(parity, members - 1))


def stripe_of(member: int, column: int, members: int, parity: int) -> int:
    """The stripe that holds shard `column` of a member's payload."""
    return (member - column - parity) % members


def data_members(stripe: int, members: int, parity: int) -> list[int]:
    """The members whose shards are the columns 0 … k-1 of a stripe."""
    return [(stripe + parity + column) % members for column in range(members - parity)]


def parity_member(stripe: int, row: int, members: int) -> int:
    """The member that holds a parity row of a stripe."""
    return (stripe + row) % members


def stripe_coded_by(member: int, row: int, members: int) -> int:
    """The stripe of which a member holds parity row `row`."""
    return (member - row) % members


def shard_bytes(payload_bytes: Sequence[int], parity: int) -> int:
    """Length of the shards: the longest payload's k-th part, rounded up. Shorter payloads count as followed
    by 0."""
    columns = len(payload_bytes) - parity
    return -(-max(payload_bytes) // (columns * ALIGNMENT)) * ALIGNMENT


def part_bounds(state_bytes: int, members: int, index: int) -> tuple[int, int]:
    """Begin and end of the part of a state that the member at `index` copies: contiguous, aligned, nearly
    equal."""
    units = -(-state_bytes // ALIGNMENT)
    begin, end = (units * i // members * ALIGNMENT for i in (index, index + 1))
    return min(begin, state_bytes), min(end, state_bytes)
