"""The interfaces of what the step protocol is given, and the values that it exchanges with them.

The protocol itself has no clock, thread, socket, process or file. `everstep.quorum` gives it connections to other
groups and ranks, `everstep.titan` the trainer (`Work`) and the run directory (`RunFiles`). The simulation replaces the
trainer, the files, the network and the clocks, and runs everything else as it is.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from everstep.quorum.request import Quorum


class OutOfData(Exception):
    """The data ended before this step, so the run is over for all groups."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of the protocol.

    Attributes:
        quorum: of one request for a quorum.
        reduce: of one sum over the groups, counted from when all of them have computed their share.
        compute: longest that a group which has computed its share waits for the others to compute theirs.
        join: how long a quorum waits for a group that is alive and does not ask for one.
        pause: longest that a busy host is expected to stop a process.
        give_up: how long a group goes on without a commit before it ends with an error.
    """

    quorum: timedelta
    reduce: timedelta
    compute: timedelta
    join: timedelta
    pause: timedelta
    give_up: timedelta


@dataclass(frozen=True, slots=True)
class SlotSums:
    """What the slots that a group holds add to the step, besides gradients.

    Attributes:
        tokens: number of valid tokens by slot, float64 [S] on the CPU; 0 for a slot that is not held.
        loss: sum of the tokens' losses by slot, float64 [S] on the CPU.
        extra: further sums that the optimizer step needs, such as expert loads, float64 [n] on the CPU, n fixed.
        slots: the slots that the group holds; empty in a sum over groups.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    extra: torch.Tensor
    slots: frozenset[int]


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that the groups have summed completely and voted for; ready for the optimizer.

    Attributes:
        step: number of the step, from 1.
        history: history of the state after this step; see `ledger.next_history`.
        parent: history of the state before this step.
        tokens: number of valid tokens by slot, float64 [S].
        loss: sum of the tokens' losses by slot, float64 [S].
        extra: sum of `SlotSums.extra` over all groups.
        owners: by slot, the group that computed it; -1 if none did, which happens only under `shrink`.
        groups: ids of the groups that took part, ascending.
        able: those of them that had the state before this step, ascending; the others heal. The first one writes what
            is written once for the whole run.
        all_leave: whether every group was asked to stop after this step.
        unfit: slots that this rank refused and another group computed without refusing them: this rank is at fault.
        quorum_id: torchft's id of the quorum, for logs.
        attempts: number of attempts that this group needed.
        compute_s, reduce_s, took_s: durations in the attempt that committed; reduce_s is the wait after computing.
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
        """Return seconds on a clock that never goes back."""

    def sleep(self, seconds: float) -> None: ...


class Work(Protocol):
    """The trainer. All ranks of the group make the same calls, except for `own_notes` and `receive_notes`."""

    def compute(self, step: int, slot: int, *, check_all: bool) -> None:
        """Run forward and backward of one slot of `step`, and add its gradient to `param.grad`.

        Args:
            check_all: whether to run every check.

        Raises:
            OutOfData: there is no data for this slot. Raised on all ranks of the group; nothing was added.
        """

    def bits(self, slot: int) -> int:
        """Return a digest of the gradient of a computed slot over all ranks of the group, 1 to 2^52: equal if all bits
        of the gradients are. Only with exact sums."""
        ...

    def audit(self, step: int, slot: int) -> int:
        """Compute a slot that another group computes too, and return its `bits`. Adds to nothing. Raises OutOfData."""
        ...

    def refused(self) -> frozenset[int]:
        """Return the slots computed since `discard` in which this rank's checks found an error that they could not
        repair: `param.grad` must not be used then. Other ranks of the group may have found other slots."""
        ...

    def not_finite(self, step: int, slots: Collection[int]) -> None:
        """End the run, or from now on let `compute` hold these slots with nothing in them: no group that was asked
        computes a finite gradient of them. Called on all groups alike."""

    def results(self) -> SlotSums:
        """Return the sums of all slots computed since `discard`, over the group's ranks."""

    def discard(self) -> None:
        """Forget all gradients and sums of the step in progress. Called after `apply`, `heal` and `restore`, too."""

    def own_notes(self, step: int) -> bytes | None:
        """Return what the other groups should know after `step`; None if no group sends notes now. A rank whose tally
        failed does not call this."""

    def receive_notes(self, notes: list[bytes]) -> None:
        """Take in the `own_notes` of every group, by ascending group id; empty if they were altered on the way."""

    def await_snapshot(self) -> None:
        """If a state was restored, wait until this rank's snapshots hold it, or for a timeout."""

    def serve(self) -> Any:
        """Return this rank's state, by reference."""

    def heal(self, state: Any) -> None:
        """Load another group's state."""

    def apply(self, commit: Commit) -> None:
        """Make the optimizer step of a commit from the reducer's finished sums, and all that belongs to a step."""

    def checksum(self) -> int | None:
        """Return the checksum of the group's parameters after the last step, 62 bits; None if no audit is due."""

    def restore(self, quorum: Quorum) -> tuple[int, int]:
        """Load the newest state from memory or disk, or start from scratch; return its step and history. Called if no
        group has a state, by all members of the quorum."""

    def goes_on(self) -> bool:
        """Whether the run has steps left to make; the same on all ranks and groups at one step."""

    def save_last(self) -> None:
        """Write the checkpoint with which this run, or this part of it, ends."""


class RunFiles(Protocol):
    """The run directory, as one rank reads and writes it."""

    def beat(self, phase: str, step: int) -> None:
        """Give a sign of life: this rank is in `phase` of `step`."""

    def fenced(self) -> bool:
        """Whether another start of this group has replaced this one."""

    def asked_to_leave(self) -> bool:
        """Whether this rank is to stop after the next commit. Once true, it stays true."""

    def groups_with_state(self) -> list[int]:
        """Return the other groups that have a state and gave a sign of life lately."""

    def finished_step(self) -> int:
        """Return the step at which this run last ended with its state saved; -1 if it never did."""

    def ended_for_all(self) -> bool:
        """Whether the run ended at `finished_step` for every group, not only for those that were asked to leave."""

    def mark_finished(self, step: int, *, for_all: bool) -> None:
        """Record that the state after `step` is saved. `for_all`: not only because groups were asked to leave."""

    def is_over(self) -> bool:
        """Whether the run has made all its steps."""
