"""Recovery sources: from what is left, the newest state that can be had whole, and how. Pure functions.

In order, where no peer lives to heal from: the newest snapshot whole in its members' memory, one whose missing parts
parity gives back, an older one, the disk checkpoint, nothing. Between memory and disk the newer step wins. Between
snapshots the newer step wins as well, whether it must be decoded or not: what decoding costs is less than a step.

Every rank of a run reaches the same decision from the same headers, so one may decide for all.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.snapshot.header import Header, Identity, Moment, coverage_error
from everstep.snapshot.parity import Code
from everstep.snapshot.peers import Held

Source = Literal["memory", "older", "parity", "disk", "nothing"]


@dataclass(frozen=True)
class Column:
    """Where one rank column's parts of the chosen step are, and exactly which files they are."""

    identity: Identity
    data: dict[int, Held]
    """The part of a member, by group."""
    parity: tuple[tuple[Held, ...], ...]
    """Per parity group with missing parts: its pieces of one code."""
    missing: tuple[int, ...]
    """Groups whose part must be decoded."""

    def names(self) -> list[str]:
        """Of all the files (`Header.name`)."""
        return [
            held.header.name for held in (*self.data.values(), *(held for pieces in self.parity for held in pieces))
        ]

    def to_json(self) -> list[Any]:
        data = [held.to_json() for held in self.data.values()]
        return [self.identity, data, [[held.to_json() for held in pieces] for pieces in self.parity], self.missing]

    @classmethod
    def from_json(cls, body: Sequence[Any]) -> "Column":
        """Raises ValueError for a header that is none."""
        identity, data, parity, missing = body
        parts = [Held.from_json(held) for held in data]
        pieces = tuple(tuple(Held.from_json(held) for held in pieces) for pieces in parity)
        return cls(Identity(*identity), {held.header.group: held for held in parts}, pieces, tuple(missing))


@dataclass(frozen=True)
class Decision:
    """Which step to start from, from where, and why not from a newer one."""

    source: Source
    step: int
    """Committed step to start from; 0 for nothing."""
    history: int = 0
    columns: dict[int, Column] = field(default_factory=dict)
    """By rank; only for the sources that restore from keepers."""
    reasons: tuple[str, ...] = ()
    """Why each newer or better source was passed over, newest first."""
    reshaped: bool = False
    """The columns are those of groups of another shape: their shards must be cut anew."""

    def to_json(self) -> list[Any]:
        columns = {str(rank): column.to_json() for rank, column in self.columns.items()}
        return [self.source, self.step, self.history, columns, self.reasons, self.reshaped]

    @classmethod
    def from_json(cls, body: Sequence[Any], rank: int) -> "Decision":
        """With the columns that this rank restores from: its own, or all if they must be cut anew. Raises ValueError
        for a header that is none."""
        source, step, history, columns, reasons, reshaped = body
        wanted = {int(of): Column.from_json(column) for of, column in columns.items() if reshaped or int(of) == rank}
        return cls(source, step, history, wanted, tuple(reasons), reshaped)

    @property
    def from_memory(self) -> bool:
        return self.source in ("memory", "older", "parity")


@dataclass
class _Candidate:
    moment: Moment
    members: tuple[int, ...]
    ranks: int
    taken_at: float = 0.0
    data: dict[int, dict[int, Held]] = field(default_factory=lambda: defaultdict(dict))
    """By rank and group."""
    parity: dict[int, list[Held]] = field(default_factory=lambda: defaultdict(list))

    @property
    def step(self) -> int:
        return self.moment[0]


def decide(
    held: Iterable[Held],
    *,
    run: str,
    ranks: int | None = None,
    topologies: Mapping[int, str] | None = None,
    disk_step: int | None = None,
    aside: Collection[str] = (),
) -> Decision:
    """The source to start from.

    Args:
        held: the buffers of every keeper that answered. A buffer known to be damaged counts as absent.
        run: only buffers of this run are used.
        ranks: ranks per group of the run that starts; None: whatever the snapshots have.
        topologies: by rank, the digest of the state's layout. None: whatever layout the snapshots have.
        disk_step: newest step of the disk checkpoint, if there is one.
        aside: buffers that are not used, by `Header.name`; whoever names them says why.
    """
    reasons: list[str] = []
    usable = [buffer for buffer in held if buffer.header.name not in aside]
    candidates = _candidates(usable, run, reasons)
    disk = -1 if disk_step is None else disk_step
    newest = candidates[0].step if candidates else None
    for candidate in candidates:
        if candidate.step <= disk:
            reasons.append(f"step {candidate.step} in memory is not newer than the disk checkpoint's, {disk}")
            break
        columns, why_not = _columns(candidate)
        if why_not:
            reasons.append(f"step {candidate.step}: {why_not}")
            continue
        if any(column.missing for column in columns.values()):
            source: Source = "parity"
        else:
            source = "memory" if candidate.step == newest else "older"
        reshaped = _reshaped(columns, ranks, topologies)
        return Decision(source, candidate.step, candidate.moment[1], columns, tuple(reasons), reshaped)
    if not candidates:
        reasons.append("no keeper holds a snapshot of this run that fits")
    if disk_step is not None:
        return Decision("disk", disk_step, reasons=tuple(reasons))
    return Decision("nothing", 0, reasons=(*reasons, "there is no disk checkpoint"))


def _reshaped(columns: Mapping[int, Column], ranks: int | None, topologies: Mapping[int, str] | None) -> bool:
    if ranks is not None and len(columns) != ranks:
        return True
    return topologies is not None and any(topologies.get(rank) != _topology(column) for rank, column in columns.items())


def _topology(column: Column) -> str:
    pieces = [*column.data.values(), *(piece for pieces in column.parity for piece in pieces)]
    return pieces[0].header.topology


def _candidates(held: Iterable[Held], run: str, reasons: list[str]) -> list[_Candidate]:
    """Steps that some keeper has a usable buffer of; the newest first, of equal steps the one committed
    last."""
    found: dict[tuple, _Candidate] = {}
    said: set[str] = set()
    for buffer in held:
        header = buffer.header
        why_not = _unusable(buffer, run)
        if why_not:
            if why_not not in said:
                said.add(why_not)
                reasons.append(why_not)
            continue
        key = (header.moment, header.members, header.ranks)
        candidate = found.setdefault(key, _Candidate(*key))
        candidate.taken_at = max(candidate.taken_at, header.taken_at)
        if header.kind == "parity":
            candidate.parity[header.rank].append(buffer)
            continue
        column = candidate.data[header.rank]
        best = column.get(header.group)
        if best is None or header.sequence > best.header.sequence:
            column[header.group] = buffer
    order = lambda c: (c.step, c.taken_at, c.moment, c.members, c.ranks)  # noqa: E731
    return sorted(found.values(), key=order, reverse=True)


def _unusable(buffer: Held, run: str) -> str:
    header = buffer.header
    where = f"step {header.step} of group {header.group}, rank {header.rank}"
    if header.run != run:
        return f"{where} belongs to another run ({header.run})"
    if buffer.sound is False:
        return f"{where} does not match its checksums"
    return ""


def _columns(candidate: _Candidate) -> tuple[dict[int, Column], str]:
    """Where every column's parts are, or a sentence on what is missing."""
    columns = {}
    for rank in range(candidate.ranks):
        data, pieces = candidate.data.get(rank, {}), candidate.parity.get(rank, [])
        headers = [buffer.header for buffer in (*data.values(), *pieces)]
        identities = {header.identity for header in headers}
        if len(identities) != 1:
            return {}, f"rank {rank} has two layouts" if headers else f"no keeper has a part of rank {rank}"
        missing = [group for group in candidate.members if group not in data]
        codes, why_not = _codes(frozenset(missing), data, pieces)
        if why_not:
            return {}, f"rank {rank}: no keeper has the part of {_names(missing)}, and {why_not}"
        if not missing:
            uncovered = coverage_error([buffer.header for buffer in data.values()])
            if uncovered:
                return {}, f"rank {rank}: {uncovered}"
        columns[rank] = Column(headers[0].identity, dict(data), codes, tuple(missing))
    return columns, ""


def _codes(
    missing: frozenset[int], data: Mapping[int, Held], pieces: list[Held]
) -> tuple[tuple[tuple[Held, ...], ...], str]:
    """For each parity group that lost parts, the pieces of a code that gives them back; or why there is none."""
    by_code: dict[tuple, dict[int, Held]] = defaultdict(dict)
    for piece in pieces:
        by_code[piece.header.parity_group, piece.header.roots][piece.header.group] = piece
    left, chosen, why = set(missing), [], "no keeper has its parity"
    for held in sorted(by_code.values(), key=lambda held: (-len(held), _any(held).roots)):
        header = _any(held)
        lost = frozenset(left.intersection(header.parity_group))
        if not lost:
            continue
        there = {group for group, root in zip(header.parity_group, header.roots, strict=True)
                 if group in data and data[group].header.root == root}  # fmt: skip
        why_not = code_of(header).lacks(frozenset(header.parity_group) - there, frozenset(held))
        if why_not:
            why = f"it cannot be decoded: {why_not}"
            continue
        chosen.append(tuple(held[group] for group in sorted(held)))
        left -= lost
    return (tuple(chosen), "") if not left else ((), why)


def code_of(header: Header) -> Code:
    """The code that a parity buffer is a piece of."""
    return Code(header.parity_group, header.parity)


def _any(held: Mapping[int, Held]) -> Header:
    return next(iter(held.values())).header


def _names(groups: list[int]) -> str:
    return ("group " if len(groups) == 1 else "groups ") + ", ".join(map(str, groups))
