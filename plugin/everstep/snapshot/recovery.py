"""Coming back: the sources decided once per group, carried out by all its ranks, and decided again when it fails.

A buffer whose bytes turn out wrong, or whose keeper dies while it is read, is set aside and the sources asked
again without it; so a damaged part is decoded from parity, and what cannot be decoded gives way to an older
step.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from everstep.run.events import event_path, last_event
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
    token, topology = read_token(run_dir), layout.topology(rank, ranks)
    aside: list[str] = []
    notes: list[str] = []
    while True:
        told = None
        if rank == 0:
            wait = patience if not aside else timedelta(0)
            told = look(run_dir, token, timeout, wait, disk_step, aside).to_json()
        decision = sources.Decision.from_json(share(told)[0], rank, topology)
        restored: Restored | None = None
        failure: tuple[list[str], str] | None = None
        try:
            own = decision.columns.get(rank)
            if own is not None and own.any.topology == topology:
                restored = restore_rank(own, group, token, timeout)
            elif decision.from_memory:
                restored = restore_reshaped(decision, rank, group, layout, token, timeout)
        except RestoreError as error:
            failure = (error.buffers, str(error))
        except ShapeError as error:
            buffers = [name for column in decision.columns.values() for name in column.names]
            failure = (buffers, f"step {decision.step} does not fit: {error}")
        failures = list(filter(None, share(failure)))
        if not failures:
            decision = replace(decision, reasons=(*notes, *decision.reasons))
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
        restored = restore_rank(decision.columns[number], group, token, timeout)
        made.take(restored.layout, restored.flat)
        fetched += restored.fetched_bytes
        decoded |= set(restored.decoded)
        if own is None or number == rank % len(saved):
            own = replace(restored, flat=_NOTHING)
    assert own is not None
    return replace(own, flat=made.finish(), layout=layout, fetched_bytes=fetched, decoded=tuple(sorted(decoded)))


REASONS = 8
"""Keepers that do not answer which are named."""
LOOK = timedelta(seconds=3)
"""How long keepers have to answer a first look; who has not is asked again, while the others are not waited for."""


def look(
    run_dir: Path,
    token: bytes,
    timeout: timedelta,
    patience: timedelta,
    disk_step: int | None = None,
    aside: Collection[str] = (),
) -> sources.Decision:
    """What can be restored. All keepers are asked at the same time, with one deadline; those that do not answer again,
    until all have, `patience` is over, or what has been found will do: it is the newest of those that answered, and no
    group whose keeper is silent has said in its log that a newer one is protected.

    `disk_step`, `aside`: of `sources.decide`.
    """
    deadline = time.monotonic() + patience.total_seconds()
    answered: dict[Place, list[Held]] = {}
    look = LOOK
    while True:
        # One that keeps several groups is asked once, and one that was killed has a successor.
        places = list({(place.host, place.segment): place for place in reversed(peers.read_places(run_dir))}.values())
        left = [place for place in places if place not in answered]
        found, silent = peers.reachable(left, token, min(look, timeout))
        look = min(2 * look, timeout)  # a host that is busy starting a run answers late
        answered.update(found)
        held = [buffer for place in places for buffer in answered.get(place, ())]
        decision = sources.decide(held, run=run_id(token), disk_step=disk_step, aside=aside)
        newest = decision.from_memory and decision.step == max(buffer.header.step for buffer in held)
        if not silent or time.monotonic() >= deadline or (newest and decision.step >= _promised(run_dir, silent)):
            break
        time.sleep(0.1)
    if decision.source == "memory":
        return decision
    unanswered = sorted(
        f"the keeper of group {p.group} on {p.host} does not answer: {why}" for p, why in silent.items()
    )
    if len(unanswered) > REASONS:
        unanswered[REASONS:] = [f"{len(unanswered) - REASONS} more keepers do not answer"]
    return replace(decision, reasons=(*decision.reasons, *unanswered))


def _promised(run_dir: Path, silent: Collection[Place]) -> int:
    """The newest step that the groups of these keepers have said is protected."""
    logs = {event_path(run_dir, place.group, 0, "worker") for place in silent}
    said = [last_event(log, {"snapshot_protected"}) for log in logs]
    return max((event["step"] for event in said if event), default=0)
