"""A round of local SGD, DiLoCo or Streaming DiLoCo: what a commit is in semi-synchronous training.

To the protocol a worker's round is what a slot is: `compute(t, m)` is worker m's optimizer steps of round t, from the
global parameters and the worker's own state, on its own slots; the reducer sums what the workers changed, and the
commit is the outer step. What a worker computes depends on nothing else, so it may be computed by any group, and again.

A worker's own state stays with the group that carries the worker, and is written to the run directory while training
goes on. A group that gets a worker which it did not carry takes the newest state from there and makes the rounds since
again: of the last rounds each group still knows the global parameters (`round_state.Mark`).
"""

from dataclasses import dataclass
from typing import Any

import torch

from everstep.quorum.heal import HealState
from everstep.run.exits import HOPELESS_EXIT, USAGE_EXIT, TrainerEnds
from everstep.semi.outer import OuterSGD
from everstep.semi.section import SemiSync
from everstep.semi.worker_store import WorkerStore
from everstep.step import exact
from everstep.step.interfaces import Commit, SlotSums
from everstep.step.reduction import local
from everstep.titan.changes import Changes
from everstep.titan.disk import DiskCheckpoints
from everstep.titan.optimizer_step import OptimizerStep
from everstep.titan.round_state import Mark, RoundState
from everstep.titan.slots import Slots
from everstep.titan.tally import Layout, RoundSums
from everstep.titan.worker_rounds import WorkerRounds

CHECKPOINT = "semi_sync"
MARKS, OWN = "marks", "own"
SLOW_S = 1.0
"""A wait for the storage that is told of."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker's round came to, besides what it changed.

    Attributes:
        tokens, loss: valid tokens and sum of their losses by optimizer step, float64 [h].
        balances: what the worker would have experts' biases be, float64 [n].
        own: this rank's part of the worker's own state after it.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    balances: torch.Tensor
    own: bytes


class Rounds:
    """Implements `everstep.titan.work.Unit`.

    Commits and events count rounds; `trainer.step` counts optimizer steps of a worker, as torchtitan does: learning
    rate, checkpoints and validation go by it.

    Args:
        trainer: an `EverstepTrainer`, whose parts before this one are made.
        optimizer, disk: the trainer's.
        slots: of a step, of which a worker has S / M.
        state: of the run, which the trainer has not restored yet.
        store: of the workers' own states.
    """

    def __init__(
        self,
        trainer: Any,
        optimizer: OptimizerStep,
        disk: DiskCheckpoints,
        slots: Slots,
        state: RoundState,
        store: WorkerStore,
    ) -> None:
        self._trainer, self._optimizer, self._disk, self._slots = trainer, optimizer, disk, slots
        self.state, self.store = state, store
        self._join_timeout_s: float = trainer.config.fault_tolerance.join_timeout_s
        self._settings: SemiSync = trainer.config.semi_sync
        self.shares, self._steps = slots.workers, self._settings.round_steps
        if slots.number % self.shares:
            self._refuse(f"the {slots.number} slots of a step cannot be split among {self.shares} workers")
        self._outer = OuterSGD.of(self._settings)
        self._held: dict[int, Held] = {}
        self._sums = Layout(RoundSums, self._steps, self._steps, len(_flat(state.balances)))
        """How a round's further sums travel."""
        self.reducer = Changes(
            slots.trainable,
            state.fragments,
            self.shares,
            self._settings.quantize,
            trainer.streams,
            exact=trainer.config.fault_tolerance.exact,
        )
        self.worker_rounds = WorkerRounds(trainer, optimizer, slots, state, store, self.reducer)
        self._is_protected = True
        self._counted_saved = self._counted_sent = 0
        self._saved = _OnDisk(self)
        disk.states[CHECKPOINT] = self._saved

    def _refuse(self, why: str) -> None:
        raise TrainerEnds(USAGE_EXIT, f'[semi_sync] method = "{self._settings.method}": {why}')

    # Workers' rounds

    def compute(self, step: int, slot: int, *, whole: bool) -> None:
        """A worker's round: `step` is the round's number, `slot` the worker's."""
        round_, worker = step, slot
        self._trainer.checkpointer.maybe_wait_for_staging()  # it reads what changes now
        try:
            tokens, loss = self.worker_rounds.make(round_, worker, whole=whole)
            self._held[worker] = Held(tokens, loss, _flat(self.state.balances), self.state.leave())
        finally:
            self._rest()
        self.reducer.offer(round_)
        losses = (loss / tokens).tolist()
        self._trainer.events.emit("worker_round", round_, worker=worker, losses=losses)

    def _rest(self) -> None:
        """The model has the global parameters, as between computations."""
        self.state.rest()
        self.worker_rounds.weights_changed()

    def refused(self) -> frozenset[int]:
        """Workers in whose rounds an optimizer step was refused twice."""
        return frozenset(self.worker_rounds.refused)

    def results(self) -> SlotSums:
        """By worker the tokens and losses of its round; of all held workers those by inner step, and the balances."""
        tokens, loss = torch.zeros(2, self.shares, dtype=torch.float64)
        tokens_by_step, loss_by_step = torch.zeros(2, self._steps, dtype=torch.float64)
        balances = torch.zeros_like(_flat(self.state.balances))
        for worker, done in self._held.items():
            tokens[worker], loss[worker] = done.tokens.sum(), done.loss.sum()
            tokens_by_step += done.tokens
            loss_by_step += done.loss
            balances += done.balances
        further = RoundSums(tokens_by_step, exact.rounded(loss_by_step), exact.rounded(balances))
        return SlotSums(tokens, loss, self._sums.pack(further), frozenset(self._held))

    def discard(self) -> None:
        """Forget what the workers of the round in progress changed."""
        self._held.clear()
        self.worker_rounds.refused.clear()
        self.reducer.forget()
        self._slots.discard()

    # The outer step

    def update(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        """Change the global parameters by what the workers changed: the outer step."""
        weights = _weights(commit)
        self._trainer.checkpointer.maybe_wait_for_staging()
        self.reducer.offer(commit.step)  # for its memory
        self.worker_rounds.absent = {worker for worker, weight in enumerate(weights) if not weight}
        self.reducer.assign(max(weights))
        norm = self._optimizer.clip(float("inf"))
        places, trained, momentum = self.state.fragment(commit.step), self.state.trained, self.state.momentum
        self._outer.step(
            [trained[at] for at in places],
            [local(grad) for at in places if (grad := self._slots.trainable[at].grad) is not None],
            [momentum[at] for at in places] if momentum else [],
        )
        sums = self._sums.unpack(commit.extra)
        self.state.balance(sums.balances * max(weights))
        self.state.mark(commit.step, commit.history)
        for worker, done in self._held.items():
            self.store.hold(self.state.place(worker, commit.step), done.own)
        self._rest()
        self._keep(commit.step)
        saved, self._counted_saved = self._counted_saved, self.store.written_bytes
        sent, self._counted_sent = self._counted_sent, self._trainer.column.payload_bytes
        return float(norm), {
            "inner_losses": (sums.loss / sums.tokens).tolist(),
            "inner_steps": self._steps,
            "weights": weights,
            "payload_bytes": self._counted_sent - sent,
            "kept_bytes": self._counted_saved - saved,
            "gradient_bytes": sum(local(param).nbytes for param in self._slots.trainable),
        }

    def words(self, commit: Commit) -> dict[int, int]:
        return {}  # [snapshot] is refused

    def _keep(self, round_: int) -> None:
        """After a commit: write the states of the workers that this group carries, and let go of those that it does not
        carry any more, once they are on disk. Say when the loss of this group begins to mean that the run ends, and
        when it no longer does."""
        self.store.let_go(self.state.place(worker, r) for worker in range(self.shares) for r in self.state.marks)
        why = self.store.keep(round_, SLOW_S if self._is_protected else 0.0)
        if why and self._is_protected:
            self._trainer.files.beat("keep", round_)
            # The other groups wait for this one as long as that, and no longer.
            why = self.store.keep(round_, self._join_timeout_s - SLOW_S)
        if self._is_protected and why:
            self._trainer.events.emit("workers_unprotected", round_, reason=why)
        elif not self._is_protected and not why:
            self._trainer.events.emit("workers_protected", round_)
        self._is_protected = not why

    # The state

    def before_restore(self) -> None:
        """Raises TrainerEnds if the run ended because a worker's state was lost, or if the checkpoint does not fit."""
        if why := self._trainer.files.why_run_ended():
            raise TrainerEnds(HOPELESS_EXIT, why)
        keys = self._disk.keys() or ()
        saved = {key.split(".")[2] for key in keys if key.startswith(f"{CHECKPOINT}.worker.")}
        if saved and len(saved) != self.shares:
            self._refuse(f"the checkpoint has {len(saved)} workers and the run {self.shares}; set workers")
        if not saved:  # no checkpoint, or one of synchronous training
            del self._disk.states[CHECKPOINT]

    def restored(self, history: int) -> None:
        self._disk.states[CHECKPOINT] = self._saved
        step, sync_steps = self._trainer.step, self._settings.sync_steps
        if step % sync_steps:
            self._refuse(f"the checkpoint is of step {step}, not of the end of a round of {sync_steps} steps")
        self.state.begin()
        own, self._saved.loaded = self._saved.loaded, {}
        if not own:
            self.state.forget_momentum()
            own = dict.fromkeys(range(self.shares), self.state.leave())
        round_ = step // self._steps
        self.state.mark(round_, history)
        for worker, state in own.items():
            self.store.hold(self.state.place(worker, round_), state)
        self._rest()

    def on_disk(self) -> dict[str, Any]:
        """What a checkpoint has besides torchtitan's own: all workers; torchtitan's own part has the optimizer of
        worker 0. As long as there is no state, where one is loaded to. A collective of the group."""
        own: dict[int, bytes] = dict.fromkeys(range(self.shares), b"")
        if self.state.marks:
            for worker in own:
                _, own[worker] = self.worker_rounds.catch_up(*self.worker_rounds.newest(worker))
            self.state.enter(own[0], self._trainer.work.committed)
            self._rest()
        return self.state.on_disk(own)

    def serve(self, state: HealState) -> None:
        """Also what a joiner needs to take workers over, and the own states that are nowhere else but here yet."""
        unkept = [(place, own) for place, own in self.store.held.values() if not self.store.on_storage(place)]
        state.meta[MARKS] = [[round_, mark.history] for round_, mark in self.state.marks.items()]
        state.meta[OWN] = [[place.worker, place.round] for place, _ in unkept]
        state.blobs |= {f"mark/{round_}": mark.merged for round_, mark in self.state.marks.items()}
        state.blobs |= {f"own/{place.worker}": own for place, own in unkept}

    def healed(self, state: HealState) -> None:
        self._rest()
        self.state.marks = {
            round_: Mark(history, state.blobs[f"mark/{round_}"]) for round_, history in state.meta[MARKS]
        }
        self.store.held.clear()
        for worker, round_ in state.meta[OWN]:
            self.store.hold(self.state.place(worker, round_), state.blobs[f"own/{worker}"])

    def close(self) -> None:
        """This group leaves: its newest states have to be on storage for those who take its workers over."""
        self.store.settle(self._join_timeout_s)


class _OnDisk:
    """A `Stateful` of torchtitan's checkpoints."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.loaded: dict[int, bytes] = {}
        """By worker its own state, once they are loaded."""

    def state_dict(self) -> dict[str, Any]:
        return self._rounds.on_disk()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = self._rounds.state.from_disk(state_dict)


def _weights(commit: Commit) -> list[float]:
    """Of each worker's change in the outer step: equal for all workers that are in the commit."""
    there = [owner >= 0 for owner in commit.owners]
    return [float(is_there) / sum(there) for is_there in there]


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Their values end to end, float64 on the CPU."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.detach().flatten().double().cpu() for t in tensors)])
