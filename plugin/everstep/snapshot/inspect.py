"""`everstep snapshots RUN_DIR`: what the keepers of a run hold, whether it is what was published, what could
be restored."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep import wire
from everstep.run.token import read_token
from everstep.snapshot import peers, sources
from everstep.snapshot.peers import Held, Place
from everstep.snapshot.recovery import gather
from everstep.snapshot.restore import RestoreError, restore_rank
from everstep.snapshot.segment import run_id

DEFAULT_TIMEOUT = timedelta(seconds=10)


class InspectError(RuntimeError):
    """A run directory that has no snapshots to look at; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One buffer, checked."""

    held: Held
    damage: str
    """"": every checksum matches."""


@dataclass(frozen=True)
class Inspection:
    """What a run's keepers hold."""

    places: list[Place]
    silent: dict[str, str]
    """Keepers that did not answer, and why."""
    held: list[Held]
    decision: sources.Decision
    """What a start would restore, the disk checkpoint left aside."""
    findings: list[Finding] | None = None
    """With `verify`: every buffer's checksums, recomputed by its keeper."""
    restored: dict[int, str] | None = None
    """With `verify`: by rank, what came of fetching (and decoding) its state: "" or what is wrong."""


def inspect(run_dir: Path, *, verify: bool = False, timeout: timedelta = DEFAULT_TIMEOUT) -> Inspection:
    """Ask every keeper of the run.

    `verify`: each keeper recomputes the checksums of all its buffers, parity included, and the newest
    restorable state of every rank is fetched and verified as a start would.

    Raises:
        InspectError: the directory is no run's, or no keeper has ever been in it.
    """
    try:
        token = read_token(run_dir)
    except (OSError, ValueError) as error:
        raise InspectError(f"{run_dir} is no run directory, or not yours: {error}") from error
    places = peers.read_places(run_dir)
    if not places:
        raise InspectError(f"{run_dir} has no keepers: the run is over, or snapshot.enable is off")
    held, silent = gather(run_dir, token, timeout, timedelta(0))
    decision = sources.decide(held, run=run_id(token))
    if not verify:
        return Inspection(places, silent, held, decision)
    restored = {}
    for rank, column in decision.columns.items():
        try:
            restore_rank(column, rank, min(column.data, default=0), token, timeout)
            restored[rank] = ""
        except RestoreError as error:
            restored[rank] = str(error)
    return Inspection(places, silent, held, decision, _check(places, token, timeout), restored)


def _check(places: Sequence[Place], token: bytes, timeout: timedelta) -> list[Finding]:
    findings = []
    for place in places:
        try:
            # Every byte is read again: far longer than an answer from memory.
            answer = peers.ask(place.address, token, {"op": "check"}, 60 * timeout)
        except wire.WireError:
            continue  # it is in `silent`
        for found in answer["findings"]:
            header = peers.header_of(found["header"], place.address)
            findings.append(Finding(Held(place.address, header, not found["damage"]), found["damage"]))
    return findings


def describe(found: Inspection, now: float | None = None) -> str:
    """The inspection as text: a line per buffer, then what a start would do."""
    now = time.time() if now is None else now
    by_address = {place.address: place for place in found.places}
    damage = {_key(f.held): f.damage for f in found.findings or ()}
    lines = [f"{'group':>5} {'rank':>4} {'kind':6} {'step':>8} {'MB':>9} {'age':>8}  {'shared by':14} checks"]
    for buffer in sorted(found.held, key=_order):
        header = buffer.header
        key = _key(buffer)
        state = _checks(buffer, damage.get(key), key in damage)
        members = _short(header.members)
        lines.append(
            f"{header.group:>5} {header.rank:>4} {header.kind:6} {header.step:>8} "
            f"{header.payload_bytes / 1e6:>9.2f} "
            f"{now - header.taken_at:>7.1f}s  {members:14} {state}"
        )
    if not found.held:
        lines.append("    no snapshot yet")
    for place in found.places:
        where = f"pid {place.pid} on {place.host}, {place.address}, {place.segment}"
        lines.append(f"keeper of group {place.group}: {where}")
    lines += [f"{name} does not answer: {why}" for name, why in found.silent.items() if by_address]
    lines += [f"not restorable: {reason}" for reason in found.decision.reasons]
    if found.decision.from_memory:
        lines.append(f"a start would restore step {found.decision.step} ({found.decision.source})")
    else:
        lines.append("a start would find nothing in memory")
    for rank, trouble in (found.restored or {}).items():
        lines.append(f"rank {rank}: " + (trouble or f"step {found.decision.step} fetched, every byte verified"))
    return "\n".join(lines)


def _short(members: tuple[int, ...]) -> str:
    return ",".join(map(str, members)) if len(members) <= 6 else f"{len(members)} groups"


def sound(found: Inspection) -> bool:
    """Whether something can be restored and, if it was verified, nothing is damaged. For the exit status."""
    damaged = any(finding.damage for finding in found.findings or ())
    failed = any((found.restored or {}).values())
    return found.decision.from_memory and not damaged and not failed


def to_json(found: Inspection) -> dict[str, Any]:
    """The inspection for programs."""
    damage = {_key(f.held): f.damage for f in found.findings or ()}
    return {
        "restorable_step": found.decision.step if found.decision.from_memory else None,
        "source": found.decision.source,
        "reasons": list(found.decision.reasons),
        "silent": found.silent,
        "buffers": [
            {
                **buffer.header.to_json(),
                "keeper": buffer.address,
                "damage": damage.get(_key(buffer)),
            }
            for buffer in sorted(found.held, key=_order)
        ],
    }


def _key(buffer: Held) -> tuple:
    header = buffer.header
    return buffer.address, header.kind, header.rank, header.sequence, header.code


def _order(buffer: Held) -> tuple:
    header = buffer.header
    return header.rank, header.kind, -header.step, header.group


def _checks(buffer: Held, damage: str | None, checked: bool) -> str:
    if checked:
        return damage or "verified now"
    return {True: "verified", False: "DAMAGED", None: "not verified yet"}[buffer.sound]
