"""Restoring a state at a start: rank 0 of a group decides on a source, and all ranks of the group restore from it.

If a buffer's bytes turn out wrong, or its keeper dies during the read, the buffer is excluded and rank 0 decides
again without it. So a damaged part is decoded from parity, and if that is impossible, an older step is restored.
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
from everstep.snapshot.peers import Held, KeeperRecord
from everstep.snapshot.restore import Restored, RestoreError, restore_rank
from everstep.snapshot.segment import run_id

_NOTHING = np.zeros(0, dtype=np.uint8)
Share = Callable[[Any], list[Any]]
"""Gathers one JSON value from every rank of the group; returns them in rank order on every rank."""


@dataclass(frozen=True)
class Recovery:
    """What a start restored, and why that."""

    decision: sources.Decision
    restored: Restored | None
    """None if the decision is not to restore from memory."""
    took_s: float

    @property
    def event(self) -> dict[str, Any]:
        """Fields of the event `recovery`: which source was used, why, and what it cost."""
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
    """Find the newest state that this group can start from, and fetch this rank's state if it is in memory.

    A collective of the group: every rank must call it, and all return the same decision.

    Args:
        layout: layout of this rank's state; a snapshot with other layouts is reshaped to it.
        disk_step: step of the newest checkpoint on disk, or None; only the value of rank 0 counts.
        timeout: longest silence of a keeper.
        patience: longest wait for keepers that have been in the run and do not answer now: they may be starting.
        share: see `Share`.
    """
    began = time.monotonic()
    token, topology = read_token(run_dir), layout.topology(rank, ranks)
    excluded: list[str] = []
    notes: list[str] = []
    while True:
        told = None
        if rank == 0:
            wait = patience if not excluded else timedelta(0)
            told = ask_keepers(run_dir, timeout, wait, disk_step, excluded).to_json()
        decision = sources.Decision.from_json(share(told)[0], rank, topology)
        restored: Restored | None = None
        failure: tuple[list[str], str] | None = None
        try:
            own = decision.columns.get(rank)
            if own is not None and own.any_header.topology == topology:
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
            excluded += buffers
            notes.append(why)


def restore_reshaped(
    decision: sources.Decision, rank: int, group: int, layout: Layout, token: bytes, timeout: timedelta
) -> Restored:
    """Build one rank's state from a snapshot of groups of another shape. It restores one saved rank after the other, so
    that only one more state is in memory at a time. Raises RestoreError or layout.ShapeError."""
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
"""At most so many keepers without an answer are named; the others are counted."""
FIRST_TIMEOUT = timedelta(seconds=3)
"""How long keepers have to answer the first request. Later requests go only to keepers that have not answered."""


def ask_keepers(
    run_dir: Path,
    timeout: timedelta,
    patience: timedelta,
    disk_step: int | None = None,
    excluded: Collection[str] = (),
    *,
    adopts: bool = False,
) -> sources.Decision:
    """Return what can be restored. This asks all keepers at once, then again those that did not answer. It stops when
    all have answered, when `patience` is over, or when the decision can hardly improve: it is the newest step that was
    found, and no group of a silent keeper has logged a newer step as protected.

    `disk_step`, `excluded`: see `sources.decide`. `adopts`: count what killed keepers left on this host as held,
    because the keepers of a start adopt it.
    """
    token = read_token(run_dir)
    deadline = time.monotonic() + patience.total_seconds()
    answered: dict[KeeperRecord, list[Held]] = {}
    wait = FIRST_TIMEOUT
    while True:
        by_age = sorted(peers.read_records(run_dir), key=lambda record: record.started_at)
        records = list({record.address: record for record in by_age}.values())  # some look after several groups
        left = [record for record in records if record not in answered]
        found, silent = peers.reachable(left, token, min(wait, timeout))
        # A killed keeper's successor answers for it. Containers may have equal names: so all are asked.
        heard = {(record.host, record.segment) for record in (*answered, *found)}
        silent = {one: why for one, why in silent.items() if (one.host, one.segment) not in heard}
        if adopts:
            found |= {one: kept for one in silent if (kept := peers.left_by(one, run_id(token)))}
            silent = {one: why for one, why in silent.items() if one not in found}
        wait = min(2 * wait, timeout)  # a host that is busy starting a run answers late
        answered.update(found)
        held = [buffer for record in records for buffer in answered.get(record, ())]
        decision = sources.decide(held, run=run_id(token), disk_step=disk_step, excluded=excluded)
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


def _promised(run_dir: Path, silent: Collection[KeeperRecord]) -> int:
    """Return the newest step that the groups of these keepers have logged as protected; 0 if there is none."""
    logs = {event_path(run_dir, record.group, 0, "worker") for record in silent}
    said = [last_event(log, {"snapshot_protected"}) for log in logs]
    return max((event["step"] for event in said if event), default=0)
