"""A buffer's header: what its file is for, and what vouches for its bytes.

A reader believes nothing of a file's name. It demands the run, kind, group, rank, step, history and layout that it
looks for, and a header that is consistent in itself; `checked` refuses every other before it is used.
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

SCHEMA_VERSION = 9
Kind = Literal["data", "parity"]
Moment = tuple[int, int, str]
"""Step, history and start of a snapshot: the same in all groups that took it together."""
KINDS: tuple[Kind, ...] = ("data", "parity")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a buffer says about itself."""

    run: str
    """The run's id; a buffer of another run is never used."""
    kind: Kind
    """`data`: a part of a rank's state. `parity`: shards coded over the parts of a parity group."""
    group: Count
    rank: Count
    ranks: Count
    """Ranks per group when the snapshot was taken."""
    step: Count
    """Committed step."""
    history: Count
    """Hash chain over the run's commits up to this step, 64 bits: equal in the groups that committed together, and
    another when the step is committed again after the run went back."""
    start: str = ""
    """Of a snapshot that was taken of a restored state: names the start that restored it. "": of a commit."""
    shared_by: tuple[tuple[Count, Count], ...]
    """The groups that share this snapshot, in ascending order: first and last of those that follow each other, so that
    a thousand are one pair."""
    parity: Count
    """Parity shards per stripe: members of the parity group that may be lost. 0 for a snapshot that is not coded."""
    parity_group: tuple[int, ...]
    """The members whose parts are coded together with this one's, in ascending order."""
    topology: str
    """Digest of the layout of the rank's state and of ranks per group."""
    state_bytes: Count
    """Size of the rank's whole state, of which each member holds a part."""
    part: tuple[int, int]
    """Where this member's part of the state begins and ends. (0, 0) in parity."""
    last_section: Count
    """Where in the payload that begins which is the same in all members: of data, which are the part, the rank's and
    group's own, and that, the layout; of parity, which is shards and that, the headers that it covers."""
    sequence: Count
    """The file's generation: counts a rank's publications, by the clock; of two buffers the higher is the younger."""
    payload_bytes: Count = 0
    root: str = ""
    """XXH3-64 of the chunk table, hexadecimal. The chunks' digests are of the bytes in the trainer's memory."""
    roots: tuple[str, ...] = ()
    """Of parity: the roots of the payloads that it is over, by member of the parity group."""
    schema: int = SCHEMA_VERSION

    @functools.cached_property
    def identity(self) -> str:
        """What parts of one state of one rank column share, and no other two states."""
        named = (self.run, self.step, self.history, self.start, self.shared_by, self.rank, self.ranks)
        return _digest(*named, self.topology, self.state_bytes)

    @property
    def name(self) -> str:
        """Tells this buffer's bytes from all others'."""
        return f"{self.kind} {self.group} {self.rank} {self.root}"

    @property
    def members(self) -> tuple[int, ...]:
        """The groups that share this snapshot, in ascending order."""
        return tuple(sorted(_members(self.shared_by)))

    @property
    def moment(self) -> "Moment":
        """What state of the run this is of."""
        return self.step, self.history, self.start

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}  # not `asdict`: a start writes many thousand

    @classmethod
    def from_json(cls, body: Any) -> "Header":
        """Raises ValueError for anything that is not, type by type and number by number, a header of this version."""
        version = body.get("schema") if isinstance(body, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"a header of schema version {version}, not {SCHEMA_VERSION}")
        return typed.parse(cls, body, "a header").checked()

    def checked(self) -> "Header":
        """This header, if it can be true. Raises ValueError otherwise."""
        members = _members(self.shared_by)
        if self.schema != SCHEMA_VERSION or not self.rank < self.ranks or self.group not in members:
            raise ValueError(f"rank {self.rank} of {self.ranks}, group {self.group} of {len(members)} members")
        together = set(self.parity_group)
        ascending = self.parity_group == tuple(sorted(together))
        if not (ascending and self.group in together and together <= members and self.parity < len(together)):
            raise ValueError(f"parity {self.parity} over the groups {self.parity_group}")
        if self.kind == "parity" and not (self.parity >= 1 and len(self.roots) == len(self.parity_group)):
            raise ValueError(f"parity over {len(self.roots)} payloads of the groups {self.parity_group}")
        begin, end = self.part
        if not (0 <= begin <= end <= self.state_bytes and end - begin <= self.last_section <= self.payload_bytes):
            raise ValueError(f"a part {self.part}, or a section that begins at {self.last_section}, and lies outside")
        return self


_FIELDS = tuple(field.name for field in fields(Header))


def listed(headers: Sequence[Header]) -> list[dict[str, Any]]:
    """Headers as JSON: the first, and of each other what is not as in the one before."""
    found = [header.to_json() for header in headers]
    later = [{k: v for k, v in body.items() if v != before[k]} for before, body in itertools.pairwise(found)]
    return found[:1] + later


def read_list(body: Any) -> list[Header]:
    """The inverse of `listed`. Raises ValueError."""
    found, given = [], typed.fields_of(Header)
    for one in typed.parse(list, body):
        found.append(Header(**found[-1].to_json() | given(one)).checked() if found else Header.from_json(one))
    return found


@functools.lru_cache(maxsize=4096)
def _digest(*named: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(named).encode())


def pairs_of(members: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as `Header.shared_by`."""
    found: list[tuple[int, int]] = []
    for member in members:
        first = found.pop()[0] if found and found[-1][1] == member - 1 else member
        found.append((first, member))
    return tuple(found)


MEMBERS_LIMIT = 100_000


@functools.lru_cache(maxsize=4096)
def _members(pairs: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """The inverse of `pairs_of`. Raises ValueError, also for what that never makes. A start of a thousand groups reads
    many thousand headers, most of the same members."""
    members: list[int] = []
    for first, last in pairs:
        if not first <= last < MEMBERS_LIMIT or (members and first <= members[-1] + 1):
            raise ValueError(f"members {first} to {last}")
        members += range(first, last + 1)
    return frozenset(members)


def coverage_error(headers: Sequence[Header]) -> str:
    """Why these members' parts are not [0, state_bytes) exactly once; "" if they are."""
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
