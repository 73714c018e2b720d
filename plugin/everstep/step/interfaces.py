"""What the step protocol needs from the world, and the values that pass between the two.

The protocol has no clock, thread, socket, process or file of its own: what acts is given to it, by `everstep.quorum`
(how it reaches other groups and ranks) and by `everstep.titan` (Work, RunFiles). A simulation stands in for the trainer
and the files, and runs the rest as it is, over a network and clocks of its own.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from everstep.quorum.request import Quorum


class OutOfData(Exception):
    """The data ended before this step: the run is over for all groups."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Named waits of the protocol.

    Attributes:
        quorum: for one quorum.
        reduce: for one sum over the groups, once all of them have computed their share.
        compute: longest that a group with nothing to compute waits for the others' share.
        join: for how long a quorum waits for a group that lives and does not ask.
        pause: longest that a process stands still on a busy host.
        give_up: without a commit for this long the group ends.
    """

    quorum: timedelta
    reduce: timedelta
    compute: timedelta
    join: timedelta
    pause: timedelta
    give_up: timedelta


@dataclass(frozen=True, slots=True)
class SlotSums:
    """What a group's held slots add to the step, besides gradients.

    Attributes:
        tokens: valid tokens by slot, float64 [S] on CPU, 0 where the slot is not held.
        loss: sum of their losses by slot, the same form.
        extra: float64 [n] on CPU, n fixed: further sums that the optimizer step needs, such as expert loads.
        slots: which slots they are of; empty in a sum over groups.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    extra: torch.Tensor
    slots: frozenset[int]


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that all its slots agree on, ready for the optimizer.

    Attributes:
        step: number of the step, from 1.
        history: of the state after this step; see `ledger.extend`.
        parent: history of the state before it.
        tokens: valid tokens by slot, float64 [S].
        loss: sum of their losses by slot, the same form.
        extra: `SlotSums.extra` over all groups.
        owners: for each slot the group that computed it, -1 if none did, under `shrink`.
        groups: groups taking part, in rank order.
        able: those of them that have the state before this step, in order; the others heal. The first writes what a run
            writes once.
        all_leave: every group asked to stop after this step.
        unfit: slots that this rank refused and that another group could compute: this rank is at fault.
        quorum_id: torchft's id of the quorum, for logs.
        attempts: how many this group needed.
        compute_s, reduce_s, took_s: of the attempt that committed; reduce_s is what compute did not hide.
    """

    step: int
    history: int
    parent: int
    tokens: torch.Tensor
    loss: torch.Tensor
    extra: torch.Tensor
    owners: tuple[int, ...]
    groups: tuple[int, ...]
    able: tuple[int, ...]
    all_leave: bool
    unfit: tuple[int, ...]
    quorum_id: int
    attempts: int
    compute_s: float
    reduce_s: float
    took_s: float


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def sleep(self, seconds: float) -> None: ...


class Work(Protocol):
    """The trainer. Every call but `serve` is taken by all ranks of the group."""

    def compute(self, step: int, slot: int, *, whole: bool) -> None:
        """Forward and backward of one slot of `step`; the gradient is added to `param.grad`. `whole`: with every check.

        Raises:
            OutOfData: there is none for this slot; on all ranks of the group. Nothing was added.
        """

    def bits(self, slot: int) -> int:
        """Of the gradient that `compute` made of a slot, of all ranks of the group: 1 to 2^52, equal where all bits
        are. Only with exact sums."""
        ...

    def audit(self, step: int, slot: int) -> int:
        """The bits of a slot that another group computes; it is added to nothing. Raises OutOfData."""
        ...

    def refused(self) -> frozenset[int]:
        """Slots computed since `discard` whose computation this rank's checks found wrong and could not repair: what
        is in `param.grad` must not be used. Other ranks of the group may have found others."""
        ...

    def not_finite(self, step: int, slots: Collection[int]) -> None:
        """Gradients of these slots are not finite on any group that was asked: either ends the run, or `compute` holds
        them from now on with nothing in them. The same on all groups."""

    def results(self) -> SlotSums:
        """Of all slots computed since `discard`, summed over the group's ranks."""

    def discard(self) -> None:
        """Forget all gradients and sums of the step in progress."""

    def notes(self, step: int) -> bytes | None:
        """What the other groups should know after `step`, or None when none of them sends anything now. Not on all
        ranks of the group, if the tally of one failed."""

    def noted(self, notes: list[bytes]) -> None:
        """What each group's `notes` said."""

    def settle(self) -> None:
        """Wait until this rank's snapshots hold the state that it restored."""

    def serve(self) -> Any:
        """This rank's state, by reference."""

    def heal(self, state: Any) -> None:
        """Take over another group's state."""

    def apply(self, commit: Commit) -> None:
        """The optimizer step of a commit, from the reducer's finished sums, and all that comes with it."""

    def checksum(self) -> int | None:
        """Of the group's parameters after the last step, 62 bits, when an audit is due; else None."""

    def restore(self, quorum: Quorum) -> tuple[int, int]:
        """No group has a state: take the newest from memory or disk, or start, as all members of the quorum do. Its
        step and history."""

    def goes_on(self) -> bool:
        """Whether the run has steps left to make; the same on all ranks and groups at one step."""

    def save_last(self) -> None:
        """Write the last checkpoint of this run, or of this part of it."""


class RunFiles(Protocol):
    """What the run directory says to a rank."""

    def beat(self, phase: str, step: int) -> None:
        """A sign of life."""

    def fenced(self) -> bool:
        """Whether another start of this group counts now."""

    def asked_to_leave(self) -> bool:
        """Whether this rank is to stop after the next commit. Once true it stays true."""

    def groups_with_state(self) -> list[int]:
        """Other groups that were heard of lately and have a state."""

    def finished_step(self) -> int:
        """The step at which this run last ended with its state saved; -1 if it never did."""

    def ended_for_all(self) -> bool:
        """Whether the run ended there for every group, and not because some were asked to leave."""

    def mark_finished(self, step: int, *, for_all: bool) -> None: ...

    def is_over(self) -> bool:
        """Whether the run has done all its steps already."""
