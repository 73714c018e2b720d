"""Recovery sources: decide which is the newest state that can be restored in full, and from where. Pure functions.

If no peer lives to heal from, the sources are, in this order: the newest snapshot, complete in its members' memory; a
snapshot with parts decoded from parity; an older one; the disk checkpoint; nothing. Between memory and disk the newer
step wins. So it does between snapshots, even if it must be decoded, because decoding costs less than a step.

Every rank of a run reaches the same decision from the same headers, so one rank may decide for all.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.run.events import named
from everstep.snapshot.header import Header, Moment, coverage_error, headers_from_json, headers_to_json
from everstep.snapshot.parity import Code
from everstep.snapshot.peers import Held

Source = Literal["memory", "older", "parity", "disk", "nothing"]


@dataclass(frozen=True)
class Column:
    """Where one rank column's parts of the chosen step are, and exactly which buffers they are."""

    data: dict[int, Held]
    """Group -> the buffer with its part."""
    parity: tuple[tuple[Held, ...], ...]
    """For each parity group that lost parts: its parity buffers."""

    @property
    def held(self) -> list[Held]:
        """All buffers of the column."""
        return [*self.data.values(), *itertools.chain(*self.parity)]

    @property
    def any_header(self) -> Header:
        """Some header of the column, for fields that are equal in all."""
        return self.held[0].header

    @property
    def missing(self) -> tuple[int, ...]:
        """Groups whose parts must be decoded."""
        return tuple(group for group in self.any_header.members if group not in self.data)

    @property
    def names(self) -> list[str]:
        """Names of all buffers (`Header.name`)."""
        return [held.header.name for held in self.held]


@dataclass(frozen=True)
class Decision:
    """Which step to start from, where it is, and why it is not a newer one."""

    source: Source
    step: int
    """Committed step to start from; 0 if the source is `nothing`."""
    columns: dict[int, Column] = field(default_factory=dict)
    """Rank -> where its parts are; empty unless the state is restored from keepers."""
    reasons: tuple[str, ...] = ()
    """Why each newer or better source was passed over, newest first."""
    anchor: Moment | None = None
    """The newest coded snapshot that keepers hold, which is not overwritten until the restored state is coded. It is
    older than the restored snapshot if that was never coded. None unless the state is restored from keepers."""

    def to_json(self) -> list[Any]:
        held = {
            str(rank): [[one.address for one in column.held], headers_to_json([one.header for one in column.held])]
            for rank, column in self.columns.items()
        }
        return [self.source, self.step, held, self.reasons, self.anchor]

    @classmethod
    def from_json(cls, body: Sequence[Any], rank: int, topology: str) -> "Decision":
        """Parse a decision, with the columns that a rank of this layout needs: its own if its layout fits, else all."""
        source, step, held, reasons, anchor = body
        own = {rank: _from_json(held[str(rank)])} if str(rank) in held else {}
        fits = any(column.any_header.topology == topology for column in own.values())
        columns = own if fits else {int(saved): _from_json(held[saved]) for saved in held}
        return cls(source, step, columns, tuple(reasons), anchor and tuple(anchor))

    @property
    def from_memory(self) -> bool:
        """Whether the state is restored from keepers, not from disk."""
        return self.source in ("memory", "older", "parity")


def _from_json(held: Sequence[Any]) -> Column:
    """Parse the column that these buffers make up. Raises ValueError."""
    addresses, headers = held
    column, why_not = _column(list(map(Held, addresses, headers_from_json(headers))))
    if column is None:
        raise ValueError(f"the chosen buffers do not make up a state: {why_not}")
    return column


def decide(held: Iterable[Held], *, run: str, disk_step: int | None = None, excluded: Collection[str] = ()) -> Decision:
    """Return the source to start from.

    Args:
        held: the buffers of every keeper that answered.
        run: id of this run; only its buffers are used.
        disk_step: newest step of the disk checkpoint, if there is one.
        excluded: buffers not to use, by `Header.name`. The reasons do not mention them.
    """
    reasons: list[str] = []
    candidates = _candidates([buffer for buffer in held if buffer.header.name not in excluded], run, reasons)
    disk = -1 if disk_step is None else disk_step
    for index, candidate in enumerate(candidates):
        step = candidate[0].header.step
        if step <= disk:
            reasons.append(f"step {step} in memory is not newer than the disk checkpoint's, {disk}")
            break
        columns, why_not = _columns(candidate)
        if why_not:
            reasons.append(f"step {step}: {why_not}")
            continue
        source: Source = "older" if index else "memory"
        if any(column.missing for column in columns.values()):
            source = "parity"
        older = [other for other in candidates[index + 1 :] if other[0].header.step > disk]
        return Decision(source, step, columns, tuple(reasons), _anchor(candidate, older))
    if not candidates:
        reasons.append("no keeper holds a snapshot of this run")
    if disk_step is not None:
        return Decision("disk", disk_step, reasons=tuple(reasons))
    return Decision("nothing", 0, reasons=tuple(reasons))


def _candidates(held: Iterable[Held], run: str, reasons: list[str]) -> list[list[Held]]:
    """Return the buffers of each state that a keeper holds any of: the newest step first, of equal steps the state that
    was published last. Appends a sentence to `reasons` for each step of another run."""
    found: dict[tuple, list[Held]] = defaultdict(list)
    strange: dict[str, None] = {}
    for buffer in held:
        header = buffer.header
        if header.run == run:
            found[header.moment, header.shared_by, header.ranks].append(buffer)
        else:
            strange[f"step {header.step} of group {header.group} belongs to another run ({header.run})"] = None
    reasons += strange
    youngest = {key: max(buffer.header.sequence for buffer in files) for key, files in found.items()}
    return [found[key] for key in sorted(found, key=lambda key: (key[0][0], youngest[key], key), reverse=True)]


def _anchor(restored: list[Held], older: list[list[Held]]) -> Moment:
    """Return the newest of these states that is coded and can be restored; if there is none, the restored one."""
    coded = filter(_is_coded, [restored, *older])
    return next((each for each in coded if each is restored or not _columns(each)[1]), restored)[0].header.moment


def _is_coded(candidate: list[Held]) -> bool:
    """Return whether each member whose part is still there has its parity too, if the snapshot has parity. So a coded
    snapshot remains coded if members are lost."""
    headers = [held.header for held in candidate]
    pieces = {(h.rank, h.group, root) for h in headers if h.kind == "parity" for root in h.roots}
    return all((h.rank, h.group, h.root) in pieces for h in headers if h.kind == "data" and h.parity)


def _columns(candidate: list[Held]) -> tuple[dict[int, Column], str]:
    """Return where each rank's parts are, by rank; or a sentence on what is missing."""
    by_rank: dict[int, list[Held]] = defaultdict(list)
    for buffer in candidate:
        by_rank[buffer.header.rank].append(buffer)
    columns = {}
    for rank in range(candidate[0].header.ranks):
        column, why_not = _column(by_rank[rank])
        if column is None:
            return {}, f"rank {rank}: {why_not}"
        columns[rank] = column
    return columns, ""


def _column(held: Sequence[Held]) -> tuple[Column | None, str]:
    """Return where one rank's parts are, given its buffers of one moment; or a sentence on what is missing."""
    if len({buffer.header.identity for buffer in held}) != 1:
        return None, "there are two layouts" if held else "no keeper has a part"
    pieces = [buffer for buffer in held if buffer.header.kind == "parity"]
    youngest_last = sorted(held, key=lambda buffer: buffer.header.sequence)
    data = {buffer.header.group: buffer for buffer in youngest_last if buffer.header.kind == "data"}
    missing = [group for group in held[0].header.members if group not in data]
    codes, why_not = _codes(frozenset(missing), data, pieces)
    if why_not:
        return None, f"no keeper has the part of {named(missing)}, and {why_not}"
    uncovered = "" if missing else coverage_error([buffer.header for buffer in data.values()])
    return (None, uncovered) if uncovered else (Column(data, codes), "")


def _codes(
    missing: frozenset[int], data: Mapping[int, Held], pieces: list[Held]
) -> tuple[tuple[tuple[Held, ...], ...], str]:
    """Return, for each parity group that lost parts, the parity buffers that restore them; or why there are none."""
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
        code = Code(header.parity_group, header.parity)
        why_not = code.lacks(frozenset(code.members) - there, frozenset(held))
        if why_not:
            why = f"it cannot be decoded: {why_not}"
            continue
        chosen.append(tuple(held[group] for group in sorted(held)))
        left -= lost
    return (tuple(chosen), "") if not left else ((), why)


def _any(held: Mapping[int, Held]) -> Header:
    return next(iter(held.values())).header
