"""A buffer's header: what its file holds, and the digest that vouches for its bytes.

A reader does not trust a file's name. It demands the run, kind, group, rank, step, history and layout that it looks
for, and a header whose fields are consistent; `Header.checked` rejects any other before it is used.
"""

import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import xxhash

from everstep.run import typed
from everstep.run.typed import Count

Kind = Literal["data", "parity"]
Moment = tuple[int, int, str]
"""Step, history and start of a snapshot: equal in all groups that took it together."""
KINDS: tuple[Kind, ...] = ("data", "parity")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a buffer says about itself."""

    run: str
    """The run's id (`segment.run_id`); a buffer of another run is never used."""
    kind: Kind
    """`data`: a part of a rank's state. `parity`: parity shards over the parts of a parity group."""
    group: Count
    rank: Count
    ranks: Count
    """Ranks per group when the snapshot was taken."""
    step: Count
    """The committed step whose state this is."""
    history: Count
    """Hash chain over the run's commits up to this step, 64 bits: equal in groups that committed together, different if
    the run went back and committed the step again."""
    start: str = ""
    """Id of the start that restored this state, if the snapshot is of a restored state; "" if it is of a commit."""
    shared_by: tuple[tuple[Count, Count], ...]
    """The groups that share this snapshot, ascending, as (first, last) of each run of consecutive ids. So a thousand
    groups take one pair."""
    parity: Count
    """Parity shards per stripe, which is how many members of the parity group may be lost; 0 if it is not coded."""
    parity_group: tuple[int, ...]
    """The members whose parts are coded together, this one included, in ascending order."""
    topology: str
    """Digest of the layout of the rank's state, of the rank and of ranks per group (`Layout.topology`)."""
    state_bytes: Count
    """Size of the rank's whole state, of which each member holds a part."""
    part: tuple[int, int]
    """First and last + 1 byte of this member's part of the state; (0, 0) in parity."""
    last_section: Count
    """Offset in the payload of its last section, which is equal in all members. A data payload is the part, what only
    this rank and group has, and the layout. A parity payload is shards and the headers of the payloads they cover."""
    sequence: Count
    """Generation of the file, from the clock: each publication of a rank has a higher number than the one before."""
    payload_bytes: Count = 0
    root: str = ""
    """XXH3-64 of the chunk table, hexadecimal. The digests in a data table are of the bytes in the trainer's memory."""
    roots: tuple[str, ...] = ()
    """In parity: the roots of the payloads of all members of `parity_group`, this one included, in that order."""
    schema: Literal[9] = 9
    """Version of the header's fields and of the file's format."""

    @functools.cached_property
    def identity(self) -> str:
        """Digest that is equal in all parts of one state of one rank column, and in no other state."""
        named = (self.run, self.step, self.history, self.start, self.shared_by, self.rank, self.ranks)
        return _digest(*named, self.topology, self.state_bytes)

    @property
    def name(self) -> str:
        """A name that no buffer with other bytes has."""
        return f"{self.kind} {self.group} {self.rank} {self.root}"

    @property
    def members(self) -> tuple[int, ...]:
        """The groups that share this snapshot, in ascending order."""
        return tuple(sorted(_members(self.shared_by)))

    @property
    def moment(self) -> "Moment":
        """Step, history and start: which state of the run this snapshot holds."""
        return self.step, self.history, self.start

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}  # `asdict` is slower, and a start writes many thousands

    @classmethod
    def from_json(cls, body: Any) -> "Header":
        """The inverse of `to_json`. Raises ValueError if the version, a field's type or a field's value is wrong."""
        return typed.parse(cls, body, "a header").checked()

    def checked(self) -> "Header":
        """Return this header if its fields are consistent. Raises ValueError otherwise."""
        members = _members(self.shared_by)
        if not self.rank < self.ranks or self.group not in members:
            raise ValueError(f"rank {self.rank} of {self.ranks}, group {self.group} of {len(members)} members")
        together = set(self.parity_group)
        ascending = self.parity_group == tuple(sorted(together))
        if not (ascending and self.group in together and together <= members and self.parity < len(together)):
            raise ValueError(f"parity {self.parity} over the groups {self.parity_group}")
        if self.kind == "parity" and not (self.parity >= 1 and len(self.roots) == len(self.parity_group)):
            raise ValueError(f"parity over {len(self.roots)} payloads of the groups {self.parity_group}")
        begin, end = self.part
        if not (0 <= begin <= end <= self.state_bytes and end - begin <= self.last_section <= self.payload_bytes):
            raise ValueError(f"part {self.part} or the section from byte {self.last_section} lies outside")
        return self


_FIELDS = tuple(field.name for field in fields(Header))


def headers_to_json(headers: Sequence[Header]) -> list[dict[str, Any]]:
    """Return headers as JSON: the first in full, of each later one the fields that differ from the one before."""
    found = [header.to_json() for header in headers]
    later = [{k: v for k, v in body.items() if v != before[k]} for before, body in itertools.pairwise(found)]
    return found[:1] + later


def headers_from_json(body: Any) -> list[Header]:
    """The inverse of `headers_to_json`. Raises ValueError."""
    found: list[Header] = []
    for one in typed.parse(list[dict[str, Any]], body):
        found.append(Header.from_json(found[-1].to_json() | one if found else one))
    return found


@functools.lru_cache(maxsize=4096)
def _digest(*named: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(named).encode())


def pairs_of(members: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return ascending numbers as (first, last) of each consecutive run, as in `Header.shared_by`."""
    found: list[tuple[int, int]] = []
    for member in members:
        first = found.pop()[0] if found and found[-1][1] == member - 1 else member
        found.append((first, member))
    return tuple(found)


MEMBERS_LIMIT = 100_000


@functools.lru_cache(maxsize=4096)
def _members(pairs: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """The inverse of `pairs_of`. Raises ValueError for pairs that it never returns. Cached, because a start of a
    thousand groups reads many thousands of headers, most with the same members."""
    members: list[int] = []
    for first, last in pairs:
        if not first <= last < MEMBERS_LIMIT or (members and first <= members[-1] + 1):
            raise ValueError(f"members {first} to {last}")
        members += range(first, last + 1)
    return frozenset(members)


def coverage_error(headers: Sequence[Header]) -> str:
    """Return why these members' parts do not cover [0, state_bytes) exactly once; "" if they do."""
    sizes = {header.state_bytes for header in headers}
    if len(sizes) != 1:
        return f"its parts are of states of {sorted(sizes)} bytes"
    (size,), at = sizes, 0
    for begin, end in sorted(header.part for header in headers):
        if begin != at:
            what = "are in no part" if begin > at else "are in two parts"
            return f"bytes {min(at, begin)} to {max(at, begin)} of {size} {what}"
        at = end
    return "" if at == size else f"bytes {at} to {size} are in no part"
