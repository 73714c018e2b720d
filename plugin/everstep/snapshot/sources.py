"""The order of recovery sources: from what is left, the newest state that can be had whole, and how. Pure functions.

Sources, first that works: a live peer (heal), the newest snapshot complete over its members' keepers, an older
one, one whose missing parts parity gives back, the disk checkpoint, nothing. Between memory and disk the
newer step wins. Between snapshots the newer step wins as well, whether it must be decoded or not: what
decoding costs is less than a step.

Every rank of a run reaches the same decision from the same headers, so one may decide for all.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from everstep.snapshot import stripes
from everstep.snapshot.peers import Held, Identity

Source = Literal["peers", "memory", "older", "parity", "disk", "nothing"]


@dataclass(frozen=True)
class Column:
    """Where one rank column's parts of the chosen step are."""

    identity: Identity
    data: dict[int, str]
    """Address of the keeper that holds it, by group."""
    parity: dict[int, str]
    """The same for parity. Empty when nothing is missing."""
    missing: tuple[int, ...]
    """Groups whose part must be decoded."""


@dataclass(frozen=True)
class Decision:
    """Which step to start from, from where, and why not from a newer one."""

    source: Source
    step: int
    """Committed step to start from; 0 for nothing."""
    lineage: str = ""
    columns: dict[int, Column] = field(default_factory=dict)
    """By rank; only for the sources that restore from keepers."""
    reasons: tuple[str, ...] = ()
    """Why each newer or better source was passed over, newest first."""

    @property
    def from_memory(self) -> bool:
        return self.source in ("memory", "older", "parity")


@dataclass
class _Candidate:
    step: int
    lineage: str
    members: tuple[int, ...]
    taken_at: float = 0.0
    data: dict[int, dict[int, Held]] = field(default_factory=lambda: defaultdict(dict))
    parity: dict[int, dict[int, Held]] = field(default_factory=lambda: defaultdict(dict))


def decide(
    held: Iterable[Held],
    *,
    run: str,
    ranks: int,
    topologies: Mapping[int, str] | None = None,
    disk_step: int | None = None,
    live_step: int | None = None,
) -> Decision:
    """The source to start from.

    Args:
        held: the buffers of every keeper that answered. A buffer known to be damaged counts as absent.
        run: only buffers of this run are used.
        ranks: ranks per group of the run that starts.
        topologies: by rank, the digest of the state's layout. None: whatever layout the snapshots have.
        disk_step: newest step of the disk checkpoint, if there is one.
        live_step: newest committed step of the groups that are alive, if any is.
    """
    reasons: list[str] = []
    if live_step is not None:
        return Decision("peers", live_step)
    candidates = _candidates(held, run, ranks, topologies, reasons)
    disk = -1 if disk_step is None else disk_step
    newest = candidates[0].step if candidates else None
    for candidate in candidates:
        if candidate.step <= disk:
            reasons.append(f"step {candidate.step} in memory is not newer than the disk checkpoint's, {disk}")
            break
        columns, why_not = _columns(candidate, ranks)
        if why_not:
            reasons.append(f"step {candidate.step}: {why_not}")
            continue
        if any(column.missing for column in columns.values()):
            source: Source = "parity"
        else:
            source = "memory" if candidate.step == newest else "older"
        return Decision(source, candidate.step, candidate.lineage, columns, tuple(reasons))
    if not candidates:
        reasons.append("no keeper holds a snapshot of this run that fits")
    if disk_step is not None:
        return Decision("disk", disk_step, reasons=tuple(reasons))
    return Decision("nothing", 0, reasons=(*reasons, "there is no disk checkpoint"))


def _candidates(
    held: Iterable[Held], run: str, ranks: int, topologies: Mapping[int, str] | None, reasons: list[str]
) -> list[_Candidate]:
    """Steps that some keeper has a usable buffer of; the newest first, of equal steps the one committed
    last."""
    found: dict[tuple[int, str, tuple[int, ...]], _Candidate] = {}
    said: set[str] = set()
    for buffer in held:
        header = buffer.header
        why_not = _unusable(buffer, run, ranks, topologies)
        if why_not:
            if why_not not in said:
                said.add(why_not)
                reasons.append(why_not)
            continue
        key = (header.step, header.lineage, header.members)
        candidate = found.setdefault(key, _Candidate(*key))
        candidate.taken_at = max(candidate.taken_at, header.taken_at)
        column = (candidate.data if header.kind == "data" else candidate.parity)[header.rank]
        best = column.get(header.group)
        if best is None or header.sequence > best.header.sequence:
            column[header.group] = buffer
    return sorted(found.values(), key=lambda c: (c.step, c.taken_at, c.lineage, c.members), reverse=True)


def _unusable(buffer: Held, run: str, ranks: int, topologies: Mapping[int, str] | None) -> str:
    header = buffer.header
    where = f"step {header.step} of group {header.group}, rank {header.rank}"
    if header.run != run:
        return f"{where} belongs to another run ({header.run})"
    if buffer.sound is False:
        return f"{where} does not match its checksums"
    if header.ranks != ranks:
        return f"snapshots were taken with {header.ranks} ranks per group, and this run has {ranks}"
    if topologies is not None and topologies.get(header.rank) != header.topology:
        return f"snapshots of rank {header.rank} are of another model or optimizer, or sharded in another way"
    return ""


def _columns(candidate: _Candidate, ranks: int) -> tuple[dict[int, Column], str]:
    """Where every column's parts are, or a sentence on what is missing."""
    columns = {}
    for rank in range(ranks):
        data, parity = candidate.data.get(rank, {}), candidate.parity.get(rank, {})
        headers = [buffer.header for buffer in (*data.values(), *parity.values())]
        topologies = {header.topology for header in headers}
        if len(topologies) != 1:
            return {}, f"rank {rank} has two layouts" if headers else f"no keeper has a part of rank {rank}"
        whole = [group for group, buffer in data.items() if buffer.header.part == (0, buffer.header.state_bytes)]
        missing = [] if whole else [group for group in candidate.members if group not in data]
        if missing:
            why_not = _undecodable(candidate.members, missing, data, parity)
            if why_not:
                return {}, f"rank {rank}: no keeper has the part of {_names(missing)}, and {why_not}"
        columns[rank] = Column(
            headers[0].identity,
            {group: data[group].address for group in (whole or data)},
            {group: buffer.address for group, buffer in parity.items()} if missing else {},
            tuple(missing),
        )
    return columns, ""


def _undecodable(
    members: tuple[int, ...], missing: list[int], data: Mapping[int, Held], parity: Mapping[int, Held]
) -> str:
    """Why the missing members' parts cannot be decoded; "" if they can."""
    n = len(members)
    shards = max(buffer.header.parity for buffer in (*data.values(), *parity.values()))
    if shards == 0:
        return "these snapshots have no parity"
    if not parity:
        return "no keeper has its parity"
    for stripe in range(n):
        givers = [members[i] for i in stripes.data_members(stripe, n, shards)]
        if not set(givers) & set(missing):
            continue
        there = sum(group in data for group in givers)
        rows = sum(members[stripes.parity_member(stripe, row, n)] in parity for row in range(shards))
        if there + rows < len(givers):
            return f"with {rows} of {shards} parity shards left it cannot be decoded"
    return ""


def _names(groups: list[int]) -> str:
    return ("group " if len(groups) == 1 else "groups ") + ", ".join(map(str, groups))
