"""A worker's round on this group: take up the worker's own state, make its optimizer steps, keep what it is by then."""

import time
from typing import Any

import torch

from everstep.run.exits import HOPELESS_EXIT, TrainerEnds
from everstep.semi.rounds import slots_of, steps_of
from everstep.semi.section import SemiSync
from everstep.semi.worker_store import Place, WorkerStore
from everstep.titan.changes import Changes
from everstep.titan.group import all_in_group, least_in_group
from everstep.titan.optimizer_step import OPTIMIZER_SLOT, OptimizerStep
from everstep.titan.round_state import RoundState
from everstep.titan.slots import Slots

POLL_S = 0.02
PATIENCE_S = 2.0
"""Least wait for a state that its group is just writing."""


class WorkerRounds:
    """Makes workers' rounds with a trainer that computes slots.

    Args:
        trainer, optimizer, slots: see `everstep.titan.rounds.Rounds`.
        state: of the run.
        store: of the workers' own states.
        changes: where a round's changes go.
    """

    def __init__(
        self,
        trainer: Any,
        optimizer: OptimizerStep,
        slots: Slots,
        state: RoundState,
        store: WorkerStore,
        changes: Changes,
    ) -> None:
        self._trainer, self._optimizer, self._slots = trainer, optimizer, slots
        self._state, self._store, self._changes = state, store, changes
        self._settings: SemiSync = trainer.config.semi_sync
        self._steps = self._settings.round_steps
        self.absent: set[int] = set()
        """Workers that are not in the last commit, as their groups were lost; only with on_loss = "shrink"."""
        self.refused: set[int] = set()
        """Workers in whose rounds checks found what was not repaired."""
        self._round_s = 0.0

    def make(self, round_: int, worker: int, *, whole: bool) -> torch.Tensor:
        """All of a worker's round: the model is as the worker leaves it, and what it changed is added. `whole`: with
        every check. A collective of the group.

        Returns valid tokens and sum of their losses by optimizer step, float64 [2, h].
        """
        begun = time.monotonic()
        place, state = self.newest(worker)
        moved = not self.carries(worker)
        caught_up, state = self.catch_up(place, state)
        if moved:
            self._store.hold(caught_up, state)
            shrinks = self._settings.on_loss == "shrink"
            self._trainer.events.emit(
                "worker_moved",
                round_,
                worker=worker,
                rounds_again=0 if shrinks else caught_up.round - place.round,
                took_s=round(time.monotonic() - begun, 3),
            )
        self._begin(caught_up, state)
        sums = self._inner_steps(round_, worker, whole=whole, synchronises=True)
        self._round_s = time.monotonic() - begun
        return sums

    def carries(self, worker: int) -> bool:
        """Whether this group has the worker's state after the last commit in memory."""
        return self._store.holds(worker, self._trainer.work.committed)

    # The state that a worker goes on from

    def newest(self, worker: int) -> tuple[Place, bytes]:
        """A worker's newest own state that all ranks of the group have, of the history that led to the last commit, and
        this rank's part of it. A collective of the group."""
        if worker not in self.absent:
            self._await(worker)
        marks = self._state.marks
        before = self._trainer.work.committed + 1
        while True:
            here = {
                place.round: place
                for place in self._store.of(worker)
                if place.round in marks and marks[place.round].history == place.history
            }
            [newest] = least_in_group(max((round_ for round_ in here if round_ < before), default=-1))
            if newest < 0:
                return self._lost(worker)
            state = self._store.read(here[newest]) if newest in here else None
            if all_in_group(state is not None):
                assert state is not None
                return here[newest], state
            before = newest

    def _lost(self, worker: int) -> tuple[Place, bytes]:
        """No group has the worker's state: it begins anew, or the run ends."""
        committed, folder = self._trainer.work.committed, self._store.folder
        if self._settings.on_loss == "shrink":
            self._trainer.events.emit("worker_begun", committed + 1, worker=worker)
            place, state = self._state.place(worker, committed), self._state.anew()
            self._store.hold(place, state)
            return place, state
        why = (
            f"the state of worker {worker} is lost: the group that carried it died, and of rounds "
            f"{min(self._state.marks)} to {committed} none is in {folder}. Start the run again, and it goes on from "
            "its last checkpoint"
        )
        self._trainer.files.end_run(why)
        raise TrainerEnds(HOPELESS_EXIT, why)

    def _await(self, worker: int) -> None:
        """Another group may be writing the state at this moment. A collective of the group."""
        newest = self._state.place(worker, self._trainer.work.committed)
        end = time.monotonic() + max(PATIENCE_S, self._round_s)
        while True:
            here = all_in_group(self._store.has(newest))
            in_time = all_in_group(time.monotonic() < end)
            if here or not in_time:
                return
            time.sleep(POLL_S)

    def catch_up(self, place: Place, state: bytes) -> tuple[Place, bytes]:
        """An own state that is not of an earlier round than the last commit, out of one that may be: the rounds since
        are made again, but where workers may be absent (`on_loss`)."""
        while place.round < self._trainer.work.committed:
            self._begin(place, state)
            if self._settings.on_loss != "shrink":
                self._inner_steps(place.round + 1, place.worker, whole=False, synchronises=False)
            place, state = self._state.place(place.worker, place.round + 1), self._state.leave()
        return place, state

    def _begin(self, place: Place, state: bytes) -> None:
        """Make the model what the worker begins its next round with."""
        self._state.enter(state, place.round)
        self.weights_changed()

    def weights_changed(self) -> None:
        """The checks' bounds are derived anew."""
        if self._trainer.checks is not None:
            self._trainer.checks.weights_changed()

    # Its steps

    def _inner_steps(self, round_: int, worker: int, *, whole: bool, synchronises: bool) -> torch.Tensor:
        """A worker's optimizer steps of a round; `synchronises`: what it changed is added to what is summed, τ steps
        before the end. Valid tokens and losses, as `make` gives them."""
        sums = torch.zeros(2, self._steps, dtype=torch.float64)
        last = self._steps - self._settings.overlap_steps
        for made, inner_step in enumerate(steps_of(round_, self._steps), 1):
            sums[:, made - 1] = torch.tensor(self.inner_step(round_, inner_step, worker, whole=whole))
            if synchronises and made == last:
                self._synchronise(round_, worker)
        return sums

    @torch.no_grad()
    def _synchronise(self, round_: int, worker: int) -> None:
        """What the worker has changed of the round's fragment so far is what it synchronises."""
        before, now = self._state.trained, self._state.live
        self._changes.add(round_, worker, (before[at] - now[at] for at in self._state.fragment(round_)))
        if self._settings.overlap_steps:
            self._changes.begin_sum(round_)

    def inner_step(self, round_: int, inner_step: int, worker: int, *, whole: bool) -> tuple[float, float]:
        """One optimizer step of a worker; its valid tokens and the sum of their losses. If an attention check refuses a
        slot, the step's gradients are computed again with every check; if it does so again, the round is refused."""
        trainer, slots = self._trainer, self._slots
        for again in (False, True):
            slots.discard()
            for slot in slots_of(worker, slots.number, slots.workers):
                trainer.files.computes(round_, worker)
                slots.compute(inner_step, slot, whole=again or whole)
            if trainer.checks is None or all_in_group(not slots.refused()):
                break
            if again:
                self.refused.add(worker)
            else:
                reason = "attention findings were not repaired"
                trainer.events.emit("slot_refused", round_, slot=worker, reason=reason)
        by_slot, loss = slots.tokens_and_losses()
        tokens = float(by_slot.sum())
        if tokens != slots.nominal_tokens:
            for param in slots.trainable:
                if param.grad is not None:
                    param.grad.mul_(slots.nominal_tokens / tokens)
        self._optimizer.step(inner_step, OPTIMIZER_SLOT - worker)
        return tokens, float(loss.sum())
