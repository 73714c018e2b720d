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

from everstep.snapshot import peers, sources
from everstep.snapshot.peers import Held, Place
from everstep.snapshot.restore import Blame, Restored, RestoreError, restore_rank
from everstep.snapshot.segment import run_id

Share = Callable[[Any], list[Any]]
"""Gathers one value from every rank of the group, in rank order, on every rank."""


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
    topology: str,
    disk_step: int | None,
    timeout: timedelta,
    patience: timedelta,
    share: Share = lambda value: [value],
) -> Recovery:
    """Find the newest state this group can start from, and fetch this rank's share if it is in memory.

    A collective of the group: every rank calls it, and all return the same decision.

    Args:
        topology: of this rank's own layout; snapshots of another are not used.
        disk_step: newest step of the disk checkpoint; rank 0's counts.
        timeout: the longest silence of a keeper.
        patience: how long to wait for keepers that have been in the run and do not answer now: they may be
        starting.
        share: see `Share`.
    """
    began = time.monotonic()
    token = peers.read_token(run_dir)
    topologies = dict(enumerate(share(topology)))
    blamed: list[Blame] = []
    notes: list[str] = []
    while True:
        decision = None
        if rank == 0:
            held, silent = gather(run_dir, token, timeout, patience if not blamed else timedelta(0))
            decision = _decide(held, silent, blamed, notes, run_id(token), ranks, topologies, disk_step)
        decision = share(decision)[0]
        if not decision.from_memory:
            return Recovery(decision, None, time.monotonic() - began)
        restored: Restored | None = None
        failure: RestoreError | None = None
        try:
            restored = restore_rank(decision.columns[rank], rank, group, token, timeout)
        except RestoreError as error:
            failure = error
        failures = [f for f in share(failure and (failure.blame, str(failure))) if f]
        if not failures:
            return Recovery(decision, restored, time.monotonic() - began)
        blamed += [blame for blame, _ in failures]
        notes += [message for _, message in failures]


def gather(run_dir: Path, token: bytes, timeout: timedelta, patience: timedelta) -> tuple[list[Held], dict[str, str]]:
    """What all keepers hold, once all answer or `patience` is over; and by keeper why it did not answer."""
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        held, silent = peers.reachable(_latest(peers.read_places(run_dir)), token, timeout)
        if not silent or time.monotonic() >= deadline:
            return held, silent
        time.sleep(0.1)


def _latest(places: list[Place]) -> list[Place]:
    """One keeper per group and host."""
    return list({(place.group, place.host): place for place in reversed(places)}.values())


def _decide(
    held: list[Held],
    silent: Mapping[str, str],
    blamed: list[Blame],
    notes: list[str],
    run: str,
    ranks: int,
    topologies: Mapping[int, str],
    disk_step: int | None,
) -> sources.Decision:
    usable = [buffer for buffer in held if not any(blame.hits(buffer.header) for blame in blamed)]
    decision = sources.decide(usable, run=run, ranks=ranks, topologies=topologies, disk_step=disk_step)
    unanswered = tuple(f"the keeper of {name} does not answer: {why}" for name, why in silent.items())
    if decision.source == "memory" and not notes:
        return decision
    return replace(decision, reasons=(*notes, *decision.reasons, *unanswered))
