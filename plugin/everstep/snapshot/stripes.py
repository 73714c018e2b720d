"""Who holds what of a coded snapshot: RAIM5's rotation (REFT, arXiv 2310.12670), for one parity shard or two.

A code has *givers*, whose payloads it protects, and *holders*, which have room for parity; every holder is a giver.
With h holders there are h stripes, and parity row j of stripe s lies with holder (s + j) mod h. The givers that hold
none of a stripe's m rows give one shard of their payload to it: a holder's payload is cut into h - m shards, that of a
giver without room into h. So no member holds both a shard and the parity over it, and all holders store and code
equally much: m / (h - m) of a payload.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

ALIGNMENT = 64


def parity_group(
    members: Sequence[int], size: int, group: int, locations: Mapping[int, int] = MappingProxyType({})
) -> tuple[int, ...]:
    """The members whose parts are coded together with those of `group`: about `size` of them (at most 1.5 times as
    many), so that coding costs the same however many groups a run has.

    Members are dealt out in turn, in the order of their locations and then of their numbers. Those on one host, and
    those on one switch, are thus in different parity groups, and the loss of a rack takes few members of each. Where
    locations are not known, numbers stand for them: schedulers give neighbouring tasks to neighbouring nodes.

    `locations`: by group (`location.location_of`); the same mapping in all groups.
    """
    order = sorted(members, key=lambda member: (locations.get(member, 0), member))
    count = max(1, round(len(members) / size))
    return tuple(sorted(order[order.index(group) % count :: count]))


def effective_parity(members: int, parity: int) -> int:
    """Parity shards per stripe that this many members allow."""
    return max(0, min(parity, members - 1))


@dataclass(frozen=True)
class Code:
    """How the payloads of some groups are coded. Groups in ascending order."""

    givers: tuple[int, ...]
    holders: tuple[int, ...]
    parity: int
    """Rows of a stripe, 1 or 2; less than there are holders."""

    def rows(self, stripe: int) -> tuple[int, ...]:
        """The holders of a stripe's parity, by row."""
        return tuple(self.holders[(stripe + row) % len(self.holders)] for row in range(self.parity))

    def columns(self, stripe: int) -> tuple[int, ...]:
        """The givers of a stripe's shards, by column."""
        rows = self.rows(stripe)
        return tuple(giver for giver in self.givers if giver not in rows)

    @functools.cache  # noqa: B019 - a handful of small codes
    def stripes_of(self, giver: int) -> tuple[int, ...]:
        """The stripes to which a giver's 0th, 1st, … shard go."""
        return tuple(stripe for stripe in range(len(self.holders)) if giver not in self.rows(stripe))

    def stripe_coded_by(self, holder: int, row: int) -> int:
        """The stripe of which a holder has parity row `row`."""
        return (self.holders.index(holder) - row) % len(self.holders)

    def shard_bytes(self, payload_bytes: Mapping[int, int]) -> int:
        """Length of the shards: what the longest needs, rounded up. What a payload lacks counts as 0."""
        return max(
            -(-payload_bytes[giver] // (len(self.stripes_of(giver)) * ALIGNMENT)) * ALIGNMENT for giver in self.givers
        )

    def lacks(self, missing: frozenset[int], parity_there: frozenset[int]) -> str:
        """Why the payloads of `missing` givers cannot be decoded from the others' and the parity of the holders that
        are there; "" if they can."""
        strange = missing - set(self.givers)
        if strange:
            return f"it does not cover {', '.join(map(str, sorted(strange)))}"
        for stripe in range(len(self.holders)):
            lost = sum(giver in missing for giver in self.columns(stripe))
            rows = sum(holder in parity_there for holder in self.rows(stripe))
            if lost > rows:
                return f"{rows} of {self.parity} parity shards are left over {lost} lost parts"
        return ""


def code_id(code: Code, roots: Mapping[int, str]) -> str:
    """Names a code over exactly these payloads."""
    body = json.dumps([code.givers, code.holders, code.parity, [roots[giver] for giver in code.givers]])
    return hashlib.blake2b(body.encode(), digest_size=12).hexdigest()


def part_bounds(state_bytes: int, members: int, index: int) -> tuple[int, int]:
    """Begin and end of the part of a state that the member at `index` copies: contiguous, aligned, nearly
    equal."""
    units = -(-state_bytes // ALIGNMENT)
    begin, end = (units * i // members * ALIGNMENT for i in (index, index + 1))
    return min(begin, state_bytes), min(end, state_bytes)
