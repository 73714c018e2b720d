"""Coming back: the sources decided once per group, carried out by all its ranks, and decided again when it fails.

A buffer whose bytes turn out wrong, or whose keeper dies while it is read, is set aside and the sources asked
again without it; so a damaged part is decoded from parity, and what cannot be decoded gives way to an older
step. A whole state for whoever wants to write it down (`fetch`, `whole`) is had in the same way.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everstep.run.token import read_token
from everstep.snapshot import peers, sources
from everstep.snapshot.header import KINDS
from everstep.snapshot.layout import Layout, Reshaped, ShapeError, whole_layout
from everstep.snapshot.peers import Held, Place
from everstep.snapshot.restore import Restored, RestoreError, restore_rank
from everstep.snapshot.segment import run_id
from everstep.snapshot.sources import Blame

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
            wait = patience if not blamed else timedelta(0)
            how = {"ranks": ranks, "topologies": topologies, "disk_step": disk_step, "blamed": blamed}
            decision = _with_reasons(look(run_dir, token, timeout, wait, **how), notes)
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

    held: list[Held]
    silent: dict[str, str]
    """By keeper that did not answer: why."""
    decision: sources.Decision
    """What can be restored of it."""


def look(
    run_dir: Path, token: bytes, timeout: timedelta, patience: timedelta, *, verify: bool = False, **how: Any
) -> Found:
    """Ask all keepers at the same time, with one deadline; those that do not answer again, until all have, `patience`
    is over, or what has been found will do. A snapshot is taken by all groups or by none: who is silent has no newer
    one that could be restored.

    Args:
        verify: have them recompute their checksums.
        how: of `sources.decide`.
    """
    deadline = time.monotonic() + patience.total_seconds()
    answered: dict[Place, list[Held]] = {}
    look_s = timeout.total_seconds() if verify else LOOK_S
    while True:
        # One that keeps several groups is asked once, and one that was killed has a successor.
        places = list({(place.host, place.segment): place for place in reversed(peers.read_places(run_dir))}.values())
        left = [place for place in places if place not in answered]
        found, silent = peers.reachable(left, token, timeout, min(look_s, timeout.total_seconds()), verify)
        look_s *= 2  # a host that is busy starting a run answers late
        answered.update(found)
        held = [buffer for place in places for buffer in answered.get(place, ())]
        decision = sources.decide(held, run=run_id(token), **how)
        newest = decision.from_memory and decision.step == max(buffer.header.step for buffer in held)
        if not silent or newest or time.monotonic() >= deadline:
            why = {f"group {place.group} on {place.host}": why for place, why in silent.items()}
            return Found(held, why, decision)
        time.sleep(0.1)


def _with_reasons(found: Found, notes: list[str]) -> sources.Decision:
    if found.decision.source == "memory" and not notes:
        return found.decision
    unanswered = [f"the keeper of {name} does not answer: {why}" for name, why in sorted(found.silent.items())]
    if len(unanswered) > REASONS:
        unanswered[REASONS:] = [f"{len(unanswered) - REASONS} more keepers do not answer"]
    return replace(found.decision, reasons=(*notes, *found.decision.reasons, *unanswered))


POLL_S = 0.1


class ExportError(RuntimeError):
    """No state that could be written; the message says why."""


@dataclass(frozen=True)
class Whole:
    """The state of a whole replica group after one step."""

    step: int
    tensors: dict[str, torch.Tensor]
    """Whole tensors, by the names that the snapshots give them."""
    meta: dict[str, Any]
    """What the groups' snapshots carry beside tensors; equal on all ranks."""
    blobs: list[dict[str, bytes]]
    """By rank: what is its own."""


def fetch(run_dir: Path, *, not_before: int = 0, timeout: timedelta, patience: timedelta) -> list[Restored]:
    """The newest state that can be had from memory, by rank.

    Args:
        not_before: the lowest step that will do; it is waited for.
        timeout: the longest silence of a keeper.
        patience: for the whole wait.

    Raises:
        ExportError: nothing restorable came in time.
    """
    token = read_token(run_dir)
    deadline = time.monotonic() + patience.total_seconds()
    blamed: list[Blame] = []
    while True:
        found = look(run_dir, token, timeout, timedelta(0), blamed=blamed)
        decision = found.decision
        if decision.from_memory and decision.step >= not_before:
            try:
                return [
                    restore_rank(column, rank, min(column.data, default=0), token, timeout)
                    for rank, column in sorted(decision.columns.items())
                ]
            except RestoreError as error:
                blamed.append(error.blame)
                why = str(error)
        elif decision.from_memory:
            why = f"the newest step in memory is {decision.step}, not {not_before}"
        else:
            silent = [f"{name} does not answer: {reason}" for name, reason in found.silent.items()]
            why = "; ".join([*decision.reasons, *silent])
        if time.monotonic() >= deadline:
            raise ExportError(f"{run_dir}: no state could be taken from memory: {why}")
        time.sleep(POLL_S)


def whole(ranks: list[Restored]) -> Whole:
    """Put the ranks' shards together.

    Raises:
        ExportError: the shards do not make up whole tensors.
    """
    layouts = [Layout.from_json(restored.layout) for restored in ranks]
    made = Reshaped(whole_layout(layouts))
    try:
        for restored, layout in zip(ranks, layouts, strict=True):
            made.take(layout, restored.flat)
        flat = torch.from_numpy(made.finish())
    except ShapeError as error:
        raise ExportError(str(error)) from error
    return Whole(ranks[0].step, made.layout.views(flat), ranks[0].meta, [restored.blobs for restored in ranks])
