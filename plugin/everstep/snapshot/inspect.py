"""`everstep snapshots RUN_DIR`: what the keepers of a run hold, whether it is what was published, what could
be restored."""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep.run.token import read_token
from everstep.snapshot import peers, sources
from everstep.snapshot.peers import Held, Place
from everstep.snapshot.recovery import look
from everstep.snapshot.restore import RestoreError, restore_rank

DEFAULT_TIMEOUT = timedelta(seconds=10)
VERIFY_TIMEOUT = timedelta(seconds=600)
"""Every byte is read again."""


class InspectError(RuntimeError):
    """A run directory that has no snapshots to look at; the message says why."""


@dataclass(frozen=True)
class Inspection:
    """What a run's keepers hold."""

    places: list[Place]
    silent: dict[str, str]
    """Keepers that did not answer, and why."""
    held: list[Held]
    decision: sources.Decision
    """What a start would restore, the disk checkpoint left aside."""
    failures: dict[int, str] = field(default_factory=dict)
    """With `verify`: ranks whose newest restorable state could not be fetched, or decoded, and why."""

    @property
    def sound(self) -> bool:
        """Whether something can be restored, and nothing is known to be damaged. For the exit status."""
        return self.decision.from_memory and not self.failures and all(held.sound is not False for held in self.held)


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
    found = look(run_dir, token, VERIFY_TIMEOUT if verify else timeout, timedelta(0), verify=verify)
    failures = {}
    for rank, column in found.decision.columns.items() if verify else ():
        try:
            restore_rank(column, rank, min(column.data, default=0), token, timeout)
        except RestoreError as error:
            failures[rank] = str(error)
    return Inspection(places, found.silent, sorted(found.held, key=_order), found.decision, failures)


def describe(found: Inspection) -> str:
    """The inspection as text: a line per buffer, then what a start would do."""
    lines = [f"{'group':>5} {'rank':>4} {'kind':6} {'step':>8} {'MB':>9} {'age':>8}  {'shared by':14} checks"]
    for buffer in found.held:
        header = buffer.header
        state = {True: "verified", False: "DAMAGED", None: "not verified yet"}[buffer.sound]
        members = ",".join(map(str, header.members)) if len(header.members) <= 6 else f"{len(header.members)} groups"
        lines.append(
            f"{header.group:>5} {header.rank:>4} {header.kind:6} {header.step:>8} "
            f"{header.payload_bytes / 1e6:>9.2f} "
            f"{time.time() - header.taken_at:>7.1f}s  {members:14} {state}"
        )
    if not found.held:
        lines.append("    no snapshot yet")
    for place in found.places:
        where = f"pid {place.pid} on {place.host}, {place.address}, {place.segment}"
        lines.append(f"keeper of group {place.group}: {where}")
    lines += [f"{name} does not answer: {why}" for name, why in found.silent.items()]
    lines += [f"not restorable: {reason}" for reason in found.decision.reasons]
    if found.decision.from_memory:
        lines.append(f"a start would restore step {found.decision.step} ({found.decision.source})")
    else:
        lines.append("a start would find nothing in memory")
    lines += [f"rank {rank} cannot be restored: {why}" for rank, why in found.failures.items()]
    return "\n".join(lines)


def to_json(found: Inspection) -> dict[str, Any]:
    """The inspection for programs."""
    return {
        "restorable_step": found.decision.step if found.decision.from_memory else None,
        "source": found.decision.source,
        "reasons": list(found.decision.reasons),
        "silent": found.silent,
        "failures": found.failures,
        "buffers": [{**held.header.to_json(), "keeper": held.address, "sound": held.sound} for held in found.held],
    }


def _order(buffer: Held) -> tuple:
    header = buffer.header
    return header.rank, header.kind, -header.step, header.group
