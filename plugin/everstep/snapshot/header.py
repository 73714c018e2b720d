"""A buffer's header: what its file is for, and what vouches for its bytes.

A reader believes nothing of a file's name. It demands the run, kind, group, rank, step, history and layout that it
looks for, and a header that is consistent in itself; `checked` refuses every other before it is used.
"""

import bisect
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import xxhash

SCHEMA_VERSION = 7
Kind = Literal["data", "parity"]
Moment = tuple[int, int, str]
"""Step, history and start of a snapshot: the same in all groups that took it together."""
KINDS: tuple[Kind, ...] = ("data", "parity")


class Identity(NamedTuple):
    """What parts of one state of one rank column share, and no other two states."""

    step: int
    key: str
    """Digest over run, step, history, start, members, rank, ranks, layout and size of the state."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a buffer says about itself."""

    run: str
    """The run's id; a buffer of another run is never used."""
    kind: Kind
    """`data`: a part of a rank's state. `parity`: shards coded over the parts of a parity group."""
    group: int
    rank: int
    ranks: int
    """Ranks per group when the snapshot was taken."""
    step: int
    """Committed step."""
    history: int
    """Hash chain over the run's commits up to this step, 64 bits: equal in the groups that committed together, and
    another when the step is committed again after the run went back."""
    start: str = ""
    """Of a snapshot that was taken of a restored state: names the start that restored it. "": of a commit."""
    members: tuple[int, ...]
    """The groups that share this snapshot, in ascending order."""
    parity: int
    """Parity shards per stripe: members of the parity group that may be lost. 0 for a snapshot that is not coded."""
    parity_group: tuple[int, ...]
    """The members whose parts are coded together with this one's, in ascending order."""
    topology: str
    """Digest of the layout of the rank's state and of ranks per group."""
    state_bytes: int
    """Size of the rank's whole state, of which each member holds a part."""
    part: tuple[int, int]
    """Where this member's part of the state begins and ends. (0, 0) in parity."""
    sections: dict[str, tuple[int, int]]
    """Where in the payload each section begins and ends."""
    sequence: int
    """The file's generation: counts a rank's publications; of two buffers the higher is the younger."""
    taken_at: float
    """Wall clock, seconds."""
    payload_bytes: int = 0
    root: str = ""
    """XXH3-64 of the chunk table, hexadecimal. The chunks' digests are of the bytes in the trainer's memory."""
    roots: tuple[str, ...] = ()
    """Of parity: the roots of the payloads that it is over, by member of the parity group."""
    schema: int = SCHEMA_VERSION

    @functools.cached_property
    def identity(self) -> Identity:
        named = [self.run, self.step, self.history, self.start, _ranges(self.members), self.rank, self.ranks]
        body = json.dumps([*named, self.topology, self.state_bytes])
        return Identity(self.step, xxhash.xxh3_128_hexdigest(body.encode()))

    @property
    def name(self) -> str:
        """Tells this buffer's bytes from all others'."""
        return f"{self.kind} {self.group} {self.rank} {self.root}"

    @property
    def moment(self) -> "Moment":
        """What state of the run this is of."""
        return self.step, self.history, self.start

    def is_for(self, *, run: str, kind: str, group: int, rank: int) -> bool:
        """Whether this is what the reader of that group's file looks for."""
        return (self.run, self.kind, self.group, self.rank) == (run, kind, group, rank)

    def to_json(self) -> dict[str, Any]:
        # Not `asdict`, which would copy every number of a thousand members.
        return {**{name: getattr(self, name) for name in _FIELDS}, "members": _ranges(self.members)}

    @classmethod
    def from_json(cls, body: Any) -> "Header":
        """Raises ValueError for anything that is not, type by type and number by number, a header of this version."""
        if not isinstance(body, dict) or body.get("schema") != SCHEMA_VERSION:
            version = body.get("schema") if isinstance(body, dict) else None
            raise ValueError(f"a header of schema version {version}, not {SCHEMA_VERSION}")
        if body.keys() != _FIELDS:
            raise ValueError(f"a header with other fields: {sorted(map(str, body.keys() ^ _FIELDS))[:3]}")
        try:
            values: dict[str, Any] = {
                **body,
                "members": _members(json.dumps(body["members"])),
                "parity_group": tuple(body["parity_group"]),
                "roots": tuple(body["roots"]),
                "part": _span(body["part"]),
                "sections": {str(name): _span(span) for name, span in body["sections"].items()},
            }
            made = cls(**values)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a header that is none: {error}") from error
        return made.checked()

    def checked(self) -> "Header":
        """This header, if it can be true. Raises ValueError otherwise."""
        integers = ("group", "rank", "ranks", "step", "history", "parity", "state_bytes", "sequence", "payload_bytes")
        for name in integers:
            if type(getattr(self, name)) is not int or not 0 <= getattr(self, name) < 1 << 64:
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        texts = ("run", "start", "topology", "root")
        for name in texts:
            if type(getattr(self, name)) is not str:
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        if type(self.taken_at) not in (int, float) or not 0 <= self.taken_at < 1 << 63:
            raise ValueError(f"taken_at is {self.taken_at!r}")
        if self.kind not in KINDS or not self.rank < self.ranks:
            raise ValueError(f"kind {self.kind}, rank {self.rank} of {self.ranks}")
        # `_members` made them, in ascending order; a start of a thousand groups reads many thousand headers.
        if not _among((self.group,), self.members):
            raise ValueError(f"group {self.group} is none of the members")
        if not (
            _ascending(self.parity_group)
            and self.group in self.parity_group
            and _among(self.parity_group, self.members)
            and self.parity < len(self.parity_group)
        ):
            raise ValueError(f"parity {self.parity} over the groups {self.parity_group}")
        if self.kind == "parity" and not (
            self.parity >= 1
            and len(self.roots) == len(self.parity_group)
            and all(type(root) is str for root in self.roots)
        ):
            raise ValueError(f"parity over {len(self.roots)} payloads of the groups {self.parity_group}")
        spans = [(self.part, self.state_bytes), *((span, self.payload_bytes) for span in self.sections.values())]
        if not all(0 <= begin <= end <= limit for (begin, end), limit in spans):
            raise ValueError("a part or section that lies outside")
        wanted = {"part", "own", "layout"} if self.kind == "data" else {"shards", "covers"}
        if self.sections.keys() != wanted or not _end_to_end(self.sections.values(), self.payload_bytes):
            raise ValueError(f"sections {self.sections} of {self.payload_bytes} bytes")
        if self.kind == "data" and self.sections["part"] != (0, self.part[1] - self.part[0]):
            raise ValueError("a part that is not where it should be")
        return self


_FIELDS = frozenset(field.name for field in fields(Header))


def _end_to_end(spans: Any, size: int) -> bool:
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            return False
        at = end
    return at == size


def _ascending(groups: tuple[int, ...]) -> bool:
    return (
        bool(groups)
        and all(type(group) is int for group in groups)
        and groups[0] >= 0
        and all(a < b for a, b in itertools.pairwise(groups))
    )


def _among(groups: tuple[int, ...], ascending: tuple[int, ...]) -> bool:
    places = ((group, bisect.bisect_left(ascending, group)) for group in groups)
    return all(place < len(ascending) and ascending[place] == group for group, place in places)


def _span(value: Any) -> tuple[int, int]:
    begin, end = value
    if type(begin) is not int or type(end) is not int:
        raise TypeError(f"{value!r} is no span of bytes")
    return begin, end


@functools.lru_cache(maxsize=4096)
def _ranges(members: tuple[int, ...]) -> list[list[int]]:
    """Ascending numbers as [first, last] pairs: a thousand groups are one pair."""
    found: list[list[int]] = []
    for member in members:
        if found and found[-1][1] == member - 1:
            found[-1][1] = member
        else:
            found.append([member, member])
    return found


MEMBERS_LIMIT = 100_000


@functools.lru_cache(maxsize=4096)
def _members(text: str) -> tuple[int, ...]:
    """The inverse of `_ranges`, from JSON. The same tuple for the same text: a restart reads thousands of headers."""
    members: list[int] = []
    for pair in json.loads(text):
        first, last = _span(pair)
        if not 0 <= first <= last < MEMBERS_LIMIT or (members and first <= members[-1]):
            raise ValueError(f"members {pair}")
        members += range(first, last + 1)
    return tuple(members)


def topology_of(layout: dict[str, Any], rank: int, ranks: int) -> str:
    """Digest that two snapshots must share to be of the same state of the same rank. `layout`: as JSON."""
    return xxhash.xxh3_128_hexdigest(json.dumps([rank, ranks, layout], sort_keys=True).encode())


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
