"""Coming back: the sources decided once per group, carried out by all its ranks, and decided again when it
fails.

A buffer whose bytes turn out wrong, or whose keeper dies while it is read, is set aside and the sources asked
again without it; so a damaged part is decoded from parity, and what cannot be decoded gives way to an older
step.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from everstep.run.token import read_token
from everstep.snapshot import peers, sources
from everstep.snapshot.header import KINDS
from everstep.snapshot.layout import Layout
from everstep.snapshot.peers import Held, Place
from everstep.snapshot.reshape import Reshaped, ShapeError
from everstep.snapshot.restore import Blame, Restored, RestoreError, restore_rank
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
    blamed: list[Blame] = []
    notes: list[str] = []
    while True:
        decision = None
        if rank == 0:

            def choose(held: list[Held], blamed: tuple[Blame, ...] = tuple(blamed)) -> sources.Decision:
                usable = [buffer for buffer in held if not any(blame.hits(buffer.header) for blame in blamed)]
                run = run_id(token)
                return sources.decide(usable, run=run, ranks=ranks, topologies=topologies, disk_step=disk_step)

            last: list[tuple[int, sources.Decision]] = []

            def enough(held: list[Held], last: list[tuple[int, sources.Decision]] = last) -> bool:
                found = choose(held)
                last[:] = [(len(held), found)]  # of thousands of headers: not to be decided again for nothing
                return found.from_memory and found.step == max(buffer.header.step for buffer in held)

            held, silent = gather(run_dir, token, timeout, patience if not blamed else timedelta(0), enough)
            known = last[0][1] if last and last[0][0] == len(held) else choose(held)
            decision = _with_reasons(known, silent, notes)
        told = share(decision and decision.to_json())[0]
        decision = decision or sources.Decision.from_json(told, rank)
        if not decision.from_memory:
            return Recovery(decision, None, time.monotonic() - began)
        restored: Restored | None = None
        failure: tuple[list[Any] | None, str] | None = None
        try:
            if decision.reshaped:
                restored = restore_reshaped(decision, rank, group, layout, token, timeout)
            else:
                restored = restore_rank(decision.columns[rank], rank, group, token, timeout)
        except RestoreError as error:
            failure = (error.blame.to_json(), str(error))
        except ShapeError as error:
            failure = (None, f"step {decision.step} does not fit: {error}")
        failures = [(blame and Blame.from_json(blame), why) for blame, why in filter(None, share(failure))]
        if not failures:
            return Recovery(decision, restored, time.monotonic() - began)
        blamed += [blame for blame, _ in failures if blame] or [
            Blame(kind, of, column.identity, None) for of, column in decision.columns.items() for kind in KINDS
        ]
        notes += [message for _, message in failures]


def restore_reshaped(
    decision: sources.Decision, rank: int, group: int, layout: Layout, token: bytes, timeout: timedelta
) -> Restored:
    """One rank's state out of a snapshot of groups of another shape, one saved rank after the other, so that one more
    state is in memory and not all.

    Raises:
        RestoreError, reshape.ShapeError
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


def gather(
    run_dir: Path,
    token: bytes,
    timeout: timedelta,
    patience: timedelta,
    enough: Callable[[list[Held]], bool] = lambda held: False,
) -> tuple[list[Held], dict[str, str]]:
    """What all keepers hold, once all answer or `patience` is over; and by keeper why it did not answer. All are asked
    at the same time, with one deadline.

    `enough`: whether what has been found will do, so that nobody else is waited for. A snapshot is taken by all groups
    or by none: who is silent has no newer one that could be restored.
    """
    deadline = time.monotonic() + patience.total_seconds()
    answered: dict[Place, list[Held]] = {}
    look_s = LOOK_S
    while True:
        places = _latest(peers.read_places(run_dir))
        left = [place for place in places if place not in answered]
        found, silent = peers.reachable(left, token, timeout, min(look_s, timeout.total_seconds()))
        look_s *= 2  # a host that is busy starting a run answers late
        answered.update(found)
        held = [buffer for place in places for buffer in answered.get(place, ())]
        if not silent or time.monotonic() >= deadline or enough(held):
            return held, {f"group {place.group} on {place.host}": why for place, why in silent.items()}
        time.sleep(0.1)


def _latest(places: list[Place]) -> list[Place]:
    """One keeper per group and host."""
    return list({(place.group, place.host): place for place in reversed(places)}.values())


def _with_reasons(decision: sources.Decision, silent: Mapping[str, str], notes: list[str]) -> sources.Decision:
    if decision.source == "memory" and not notes:
        return decision
    unanswered = [f"the keeper of {name} does not answer: {why}" for name, why in sorted(silent.items())]
    if len(unanswered) > REASONS:
        unanswered[REASONS:] = [f"{len(unanswered) - REASONS} more keepers do not answer"]
    return replace(decision, reasons=(*notes, *decision.reasons, *unanswered))
