"""Coming back: the sources decided once per group, carried out by all its ranks, and decided again when it fails.

A buffer whose bytes turn out wrong, or whose keeper dies while it is read, is set aside and the sources asked
again without it; so a damaged part is decoded from parity, and what cannot be decoded gives way to an older
step.

`inspect` says what the keepers of a run hold and what a start would do, for `everstep snapshots RUN_DIR`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from everstep.run.token import read_token
from everstep.snapshot import peers, sources
from everstep.snapshot.layout import Layout, Reshaped, ShapeError
from everstep.snapshot.peers import Held, Place
from everstep.snapshot.restore import Restored, RestoreError, restore_rank
from everstep.snapshot.segment import run_id

_NOTHING = np.zeros(0, dtype=np.uint8)
Share = Callable[[Any], list[Any]]
"""Gathers one JSON value from every rank of the group, in rank order, on every rank."""


@dataclass(frozen=True)
class Recovery:
    """What a start found."""

    decision: sources.Decision
    restored: Restored | None
    """None when the decision is not to restore from memory."""
    took_s: float

    @property
    def event(self) -> dict[str, Any]:
        """Fields of the event that tells which source was used, why, and what it cost."""
        restored = self.restored
        return {
            "source": self.decision.source,
            "restored_step": self.decision.step,
            "reasons": list(self.decision.reasons),
            "bytes": restored.fetched_bytes if restored else 0,
            "decoded_groups": list(restored.decoded) if restored else [],
            "took_s": round(self.took_s, 4),
        }


def recover(
    run_dir: Path,
    *,
    group: int,
    rank: int,
    ranks: int,
    layout: Layout,
    disk_step: int | None,
    timeout: timedelta,
    patience: timedelta,
    share: Share = lambda value: [value],
) -> Recovery:
    """Find the newest state this group can start from, and fetch this rank's share if it is in memory.

    A collective of the group: every rank calls it, and all return the same decision.

    Args:
        layout: of this rank's own state; snapshots of another are cut anew.
        disk_step: newest step of the disk checkpoint; rank 0's counts.
        timeout: the longest silence of a keeper.
        patience: how long to wait for keepers that have been in the run and do not answer now: they may be
        starting.
        share: see `Share`.
    """
    began = time.monotonic()
    token = read_token(run_dir)
    topologies = dict(enumerate(share(layout.topology(rank, ranks))))
    aside: list[str] = []
    notes: list[str] = []
    while True:
        decision = None
        if rank == 0:
            wait = patience if not aside else timedelta(0)
            how = {"ranks": ranks, "topologies": topologies, "disk_step": disk_step, "aside": aside}
            decision = _with_reasons(look(run_dir, token, timeout, wait, **how), notes)
        told = share(decision and decision.to_json())[0]
        decision = decision or sources.Decision.from_json(told, rank)
        if not decision.from_memory:
            return Recovery(decision, None, time.monotonic() - began)
        restored: Restored | None = None
        failure: tuple[list[str], str] | None = None
        try:
            if decision.reshaped:
                restored = restore_reshaped(decision, rank, group, layout, token, timeout)
            else:
                restored = restore_rank(decision.columns[rank], rank, group, token, timeout)
        except RestoreError as error:
            failure = (error.buffers, str(error))
        except ShapeError as error:
            buffers = [name for column in decision.columns.values() for name in column.names()]
            failure = (buffers, f"step {decision.step} does not fit: {error}")
        failures = list(filter(None, share(failure)))
        if not failures:
            return Recovery(decision, restored, time.monotonic() - began)
        for buffers, why in failures:
            aside += buffers
            notes.append(why)


def restore_reshaped(
    decision: sources.Decision, rank: int, group: int, layout: Layout, token: bytes, timeout: timedelta
) -> Restored:
    """One rank's state out of a snapshot of groups of another shape, one saved rank after the other, so that one more
    state is in memory and not all.

    Raises:
        RestoreError, layout.ShapeError
    """
    made, saved = Reshaped(layout), sorted(decision.columns)
    fetched, own, decoded = 0, None, set()
    for number in saved:
        restored = restore_rank(decision.columns[number], number, group, token, timeout)
        try:
            made.take(Layout.from_json(restored.layout), restored.flat)
        except (KeyError, TypeError) as error:
            raise ShapeError(f"the layout of rank {number} is none: {error}") from error
        fetched += restored.fetched_bytes
        decoded |= set(restored.decoded)
        if own is None or number == rank % len(saved):
            own = replace(restored, flat=_NOTHING)
    assert own is not None
    return replace(
        own, flat=made.finish(), layout=layout.to_json(), fetched_bytes=fetched, decoded=tuple(sorted(decoded))
    )


REASONS = 8
"""Keepers that do not answer which are named."""
LOOK_S = 3.0
"""How long keepers have to answer a first look; who has not is asked again, while the others are not waited for."""


@dataclass(frozen=True)
class Found:
    """What the keepers of a run hold."""

    places: list[Place]
    """Of the keepers that have been in the run."""
    silent: dict[str, str]
    """By keeper that did not answer: why."""
    held: list[Held]
    decision: sources.Decision
    """What can be restored of it."""
    failures: dict[int, str] = field(default_factory=dict)
    """With `inspect(verify)`: ranks whose newest restorable state could not be fetched, or decoded, and why."""

    @property
    def sound(self) -> bool:
        """Whether something can be restored, and nothing is known to be damaged. For the exit status."""
        return self.decision.from_memory and not self.failures and all(held.sound is not False for held in self.held)


def look(run_dir: Path, token: bytes, timeout: timedelta, patience: timedelta, **how: Any) -> Found:
    """Ask all keepers at the same time, with one deadline; those that do not answer again, until all have, `patience`
    is over, or what has been found will do. A snapshot is taken by all groups or by none: who is silent has no newer
    one that could be restored.

    Args:
        how: of `sources.decide`.
    """
    deadline = time.monotonic() + patience.total_seconds()
    answered: dict[Place, list[Held]] = {}
    look_s = LOOK_S
    while True:
        # One that keeps several groups is asked once, and one that was killed has a successor.
        places = list({(place.host, place.segment): place for place in reversed(peers.read_places(run_dir))}.values())
        left = [place for place in places if place not in answered]
        found, silent = peers.reachable(left, token, timeout, min(look_s, timeout.total_seconds()))
        look_s *= 2  # a host that is busy starting a run answers late
        answered.update(found)
        held = [buffer for place in places for buffer in answered.get(place, ())]
        decision = sources.decide(held, run=run_id(token), **how)
        newest = decision.from_memory and decision.step == max(buffer.header.step for buffer in held)
        if not silent or newest or time.monotonic() >= deadline:
            why = {f"group {place.group} on {place.host}": why for place, why in silent.items()}
            return Found(places, why, held, decision)
        time.sleep(0.1)


def _with_reasons(found: Found, notes: list[str]) -> sources.Decision:
    if found.decision.source == "memory" and not notes:
        return found.decision
    unanswered = [f"the keeper of {name} does not answer: {why}" for name, why in sorted(found.silent.items())]
    if len(unanswered) > REASONS:
        unanswered[REASONS:] = [f"{len(unanswered) - REASONS} more keepers do not answer"]
    return replace(found.decision, reasons=(*notes, *found.decision.reasons, *unanswered))


DEFAULT_TIMEOUT = timedelta(seconds=10)


class InspectError(RuntimeError):
    """A run directory that has no snapshots to look at; the message says why."""


def inspect(run_dir: Path, *, verify: bool = False, timeout: timedelta = DEFAULT_TIMEOUT) -> Found:
    """Ask every keeper of the run.

    `verify`: the newest restorable state of every rank is fetched, decoded and verified as a start would.

    Raises:
        InspectError: the directory is no run's, or no keeper has ever been in it.
    """
    try:
        token = read_token(run_dir)
    except (OSError, ValueError) as error:
        raise InspectError(f"{run_dir} is no run directory, or not yours: {error}") from error
    if not peers.read_places(run_dir):
        raise InspectError(f"{run_dir} has no keepers: the run is over, or snapshot.enable is off")
    found = look(run_dir, token, timeout, timedelta(0))
    failures = {}
    for rank, column in found.decision.columns.items() if verify else ():
        try:
            restore_rank(column, rank, min(column.data, default=0), token, timeout)
        except RestoreError as error:
            failures[rank] = str(error)
    return replace(found, failures=failures)


def describe(found: Found) -> str:
    """The inspection as text: a line per buffer, then what a start would do."""
    lines = [f"{'group':>5} {'rank':>4} {'kind':6} {'step':>8} {'MB':>9} {'age':>8}  {'shared by':14} checks"]
    for buffer in sorted(found.held, key=_order):
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


def _order(buffer: Held) -> tuple:
    header = buffer.header
    return header.rank, header.kind, -header.step, header.group
