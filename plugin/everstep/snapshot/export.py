"""A whole state out of the keepers' memory, for whoever wants to write it down.

Every rank's state of one step is fetched and verified as a start would do it, and the ranks' shards are put together
to whole tensors. The keepers and the training beside it do not notice.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from everstep import wire
from everstep.run.token import read_token
from everstep.snapshot import peers, sources
from everstep.snapshot.layout import Layout
from everstep.snapshot.recovery import gather
from everstep.snapshot.reshape import Reshaped, ShapeError, whole_layout
from everstep.snapshot.restore import Blame, Restored, RestoreError, restore_rank
from everstep.snapshot.segment import run_id

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
        not_before: the step that is wanted; it is waited for. If it cannot be had any more, a newer one is taken.
        timeout: the longest silence of a keeper.
        patience: for the whole wait.

    Raises:
        ExportError: nothing restorable came in time.
    """
    token = read_token(run_dir)
    deadline = time.monotonic() + patience.total_seconds()
    blamed: list[Blame] = []
    why = "no keeper of this run answers"
    while True:
        held, silent = gather(run_dir, token, timeout, timedelta(0))
        usable = [buffer for buffer in held if not any(blame.hits(buffer.header) for blame in blamed)]
        decision = sources.decide(usable, run=run_id(token))
        if not_before and decision.step > not_before:
            wanted = [buffer for buffer in usable if buffer.header.step == not_before]
            exact = sources.decide(wanted, run=run_id(token))
            decision = exact if exact.from_memory else decision
        if decision.from_memory and decision.step >= not_before:
            try:
                return _read(decision, token, timeout)
            except RestoreError as error:
                blamed.append(error.blame)
                why = str(error)
            except wire.WireError as error:
                why = str(error)
        elif decision.from_memory:
            why = f"the newest step in memory is {decision.step}, not {not_before}"
        else:
            why = "; ".join([*decision.reasons, *(f"{name} does not answer: {w}" for name, w in silent.items())]) or why
        if time.monotonic() >= deadline:
            raise ExportError(f"{run_dir}: no state could be taken from memory: {why}")
        time.sleep(POLL_S)


def _read(decision: sources.Decision, token: bytes, timeout: timedelta) -> list[Restored]:
    """All ranks' states, while their buffers are held."""
    buffers = [held for column in decision.columns.values() for held in column.data.values()]
    with peers.Hold(buffers, token, timeout):
        return [
            restore_rank(column, rank, min(column.data, default=0), token, timeout)
            for rank, column in sorted(decision.columns.items())
        ]


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
