"""Local SGD, DiLoCo and Streaming DiLoCo on the step protocol: a commit is a round.

To the protocol a worker's round is what a slot is: `compute(t, m)` is worker m's optimizer steps of round t, from the
global parameters and the worker's own state, on its own slots; the reducer sums what the workers changed, and the
commit is the outer step. What a worker computes depends on nothing else, so it may be computed by any group, and again.

A worker's own state stays with the group that carries the worker, and is written to the run directory while training
goes on. A group that gets a worker which it did not carry takes the newest state from there and makes the rounds since
again: of the last rounds each group still knows the global parameters (`rounds.Mark`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from everstep.config.sections import FaultTolerance
from everstep.quorum.heal import HealState
from everstep.run.exits import HOPELESS_EXIT, USAGE_EXIT, TrainerEnds
from everstep.semi.outer import OuterSGD
from everstep.semi.section import SemiSync
from everstep.semi.worker_files import WorkerFiles, folder_of
from everstep.semi.worker_states import WorkerStates
from everstep.step import exact
from everstep.step.interfaces import Commit, SlotSums
from everstep.step.quorum import Quorum
from everstep.step.reduction import local
from everstep.step.streams import Streams
from everstep.titan.fragments import Changes
from everstep.titan.optimizer_step import OptimizerStep
from everstep.titan.rounds import Mark, RoundState
from everstep.titan.tally import Layout, RoundSums
from everstep.titan.work import SlotTrainer
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


class Committing(Protocol):
    """What a trainer does about commits, besides computing slots; see `Work` for what is not said here."""

    def take_step(self, commit: Commit, update: Callable[[Commit], tuple[float, dict[str, Any]]]) -> None:
        """All that comes with a commit, of which `update` changes the parameters."""

    def advance(self, commit: int) -> None:
        """Count the optimizer steps up to a commit."""

    def restore(self, quorum: Quorum) -> tuple[int, int]: ...

    def checksum(self) -> int | None: ...

    def goes_on(self) -> bool: ...

    def save_last(self) -> None: ...


class Rounds:
    """Implements `everstep.step.interfaces.Work` for a run whose commits are rounds of `[semi_sync]` workers, by
    driving a trainer that computes slots. Commits and events count rounds; `trainer.step` counts optimizer steps of a
    worker, as torchtitan does: learning rate, checkpoints and validation go by it.

    Args:
        trainer: prepared for slots, of which a worker has S / M.
        commits, optimizer: the trainer's.
        streams: of its device.
        whose: words that a worker's state is bound to: the run, and how its groups are laid out.
        token: the run's.
    """

    def __init__(
        self,
        trainer: SlotTrainer,
        commits: Committing,
        optimizer: OptimizerStep,
        streams: Streams,
        whose: str,
        token: bytes,
    ) -> None:
        self._trainer, self._commits, self._optimizer = trainer, commits, optimizer
        config: Any = trainer.config
        self._ft: FaultTolerance = config.fault_tolerance
        self._settings: SemiSync = config.semi_sync
        settings = self._settings
        self._workers, self._steps = trainer.shares, settings.round_steps
        if trainer.slots % self._workers:
            self._refuse(f"the {trainer.slots} slots of a step cannot be split among {self._workers} workers")
        self._outer = OuterSGD.of(settings)
        parts = (trainer.model_parts, trainer.optimizers, trainer.lr_schedulers, trainer.disk.counters)
        self.state = RoundState(*parts, settings=settings, momentum=self._outer.momentum != 0)
        self._held: dict[int, Held] = {}
        self._sums = Layout(RoundSums, self._steps, self._steps, len(_flat(self.state.balances)))
        """How a round's further sums travel."""
        self._changes = Changes(
            trainer.trainable,
            self.state.fragments,
            self._workers,
            settings.quantize,
            streams,
            exact=self._ft.exact,
        )
        self.reducer = self._changes.reducer
        files = WorkerFiles(
            folder_of(trainer.run_dir),
            rank=dist.get_rank(),
            whose=whose,
            nbytes=self.state.own_bytes,
            token=token,
        )
        self.store = WorkerStates(files)
        self.rounds = WorkerRounds(trainer, optimizer, settings, self.state, self.store, self._changes)
        self._is_protected = True
        self._counted_saved = self._counted_sent = 0
        self._saved = _OnDisk(self)
        trainer.disk.states[CHECKPOINT] = self._saved

    def _refuse(self, why: str) -> None:
        raise TrainerEnds(USAGE_EXIT, f'[semi_sync] method = "{self._settings.method}": {why}')

    # Workers' rounds

    def compute(self, step: int, slot: int, *, whole: bool) -> None:
        """A worker's round: `step` is the round's number, `slot` the worker's."""
        round_, worker = step, slot
        self._trainer.checkpointer.maybe_wait_for_staging()  # it reads what changes now
        try:
            tokens, loss = self.rounds.make(round_, worker, whole=whole)
            self._held[worker] = Held(tokens, loss, _flat(self.state.balances), self.state.leave())
        finally:
            self._rest()
        self._changes.offer(round_)
        losses = (loss / tokens).tolist()
        self._trainer.events.emit("worker_round", round_, worker=worker, losses=losses)

    def _rest(self) -> None:
        """The model has the global parameters, as between computations."""
        self.state.rest()
        self.rounds.weights_changed()

    def results(self) -> SlotSums:
        """By worker the tokens and losses of its round; of all held workers those by inner step, and the balances."""
        tokens, loss = torch.zeros(2, self._workers, dtype=torch.float64)
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
        self.rounds.refused.clear()
        self._changes.forget()
        self._trainer.discard()

    # The outer step

    def apply(self, commit: Commit) -> None:
        """The outer step, and all that comes with a commit."""
        self._commits.take_step(commit, self._outer_step)

    def _outer_step(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        """Change the global parameters by what the workers changed; the norm of that, and what the commit's event
        tells of it."""
        trainer, weights = self._trainer, _weights(commit)
        trainer.checkpointer.maybe_wait_for_staging()
        self._changes.offer(commit.step)  # for its memory
        self.rounds.absent = {worker for worker, weight in enumerate(weights) if not weight}
        self.reducer.assign(max(weights))
        norm = self._optimizer.clip(float("inf"))
        places, trained, momentum = self.state.fragment(commit.step), self.state.trained, self.state.momentum
        self._outer.step(
            [trained[at] for at in places],
            [local(grad) for at in places if (grad := trainer.trainable[at].grad) is not None],
            [momentum[at] for at in places] if momentum else [],
        )
        self._commits.advance(commit.step)
        self.state.balance(self._sums.unpack(commit.extra).balances * max(weights))
        self.state.mark(commit.step, commit.history)
        for worker, done in self._held.items():
            self.store.hold(self.rounds.place(worker, commit.step), done.own)
        self._rest()
        self._keep(commit.step)
        return float(norm), self._told_of(commit)

    def _told_of(self, commit: Commit) -> dict[str, Any]:
        """Further fields of a commit's event."""
        sums = self._sums.unpack(commit.extra)
        saved, self._counted_saved = self._counted_saved, self.store.files.written_bytes
        sent, self._counted_sent = self._counted_sent, self._trainer.column.payload_bytes
        return {
            "inner_losses": (sums.loss / sums.tokens).tolist(),
            "inner_steps": self._steps,
            "weights": _weights(commit),
            "payload_bytes": self._counted_sent - sent,
            "kept_bytes": self._counted_saved - saved,
            "gradient_bytes": sum(local(param).nbytes for param in self._trainer.trainable),
        }

    def _keep(self, round_: int) -> None:
        """After a commit: write the states of the workers that this group carries, and let go of those that it does not
        carry any more, once they are on disk. Before the next round each worker's state before the newest has to be on
        storage, or is waited for: of the rounds since all groups know what they synchronised."""
        for place, state in self.store.held.values():
            if place.round == round_:
                self.store.save(place, state)
        self.store.let_go([self.rounds.place(worker, r) for worker in range(self._workers) for r in self.state.marks])
        if not self._is_protected:
            self._tell_protection(round_, self.store.behind())
        elif not self.store.catch_up(SLOW_S):
            self._trainer.files.beat("keep", round_)
            # The other groups wait for this one as long as that, and no longer.
            self.store.catch_up(self._ft.join_timeout_s - SLOW_S)
            self._tell_protection(round_, self.store.behind())

    def _tell_protection(self, round_: int, why: str) -> None:
        """Say when the loss of this group begins to mean that the run ends, and when it no longer does."""
        if self._is_protected == (not why):
            return
        self._is_protected = not why
        if why:
            self._trainer.events.emit("workers_unprotected", round_, reason=why)
        else:
            self._trainer.events.emit("workers_protected", round_)

    # The state

    def restore(self, quorum: Quorum) -> tuple[int, int]:
        """See `Work.restore`. Raises TrainerEnds if the run ended because a worker's state was lost."""
        if why := self._trainer.files.why_run_ended():
            raise TrainerEnds(HOPELESS_EXIT, why)
        keys = self._trainer.disk.keys() or ()
        saved = {key.split(".")[2] for key in keys if key.startswith(f"{CHECKPOINT}.worker.")}
        if saved and len(saved) != self._workers:
            self._refuse(f"the checkpoint has {len(saved)} workers and the run {self._workers}; set workers")
        states = self._trainer.disk.states
        if not saved:  # no checkpoint, or one of synchronous training
            del states[CHECKPOINT]
        round_, history = self._commits.restore(quorum)
        states[CHECKPOINT] = self._saved
        if self._trainer.step % self._settings.sync_steps:
            self._refuse(
                f"the checkpoint is of step {self._trainer.step}, not of the end of a round of "
                f"{self._settings.sync_steps} steps"
            )
        self.state.begin()
        own = self._saved.loaded
        if not saved:
            self.state.forget_momentum()
            own = dict.fromkeys(range(self._workers), self.state.leave())
        self.state.mark(round_, history)
        for worker, state in own.items():
            self.store.hold(self.rounds.place(worker, round_), state)
        self._rest()
        return round_, history

    def on_disk(self) -> dict[str, Any]:
        """What a checkpoint has besides torchtitan's own: all workers; torchtitan's own part has the optimizer of
        worker 0. As long as there is no state, where one is loaded to. A collective of the group."""
        own: dict[int, bytes] = dict.fromkeys(range(self._workers), b"")
        if self.state.marks:
            for worker in own:
                _, own[worker] = self.rounds.catch_up(*self.rounds.newest(worker))
            self.state.enter(own[0], self._trainer.committed)
            self._rest()
        return self.state.on_disk(own)

    def serve(self) -> HealState:
        """Also what a joiner needs to take workers over, and the own states that are nowhere else but here yet."""
        state = self._trainer.serve()
        unkept = [(place, own) for place, own in self.store.held.values() if not self.store.files.has(place)]
        state.meta[MARKS] = [[round_, mark.history] for round_, mark in self.state.marks.items()]
        state.meta[OWN] = [[place.worker, place.round] for place, _ in unkept]
        state.blobs |= {f"mark/{round_}": mark.merged for round_, mark in self.state.marks.items()}
        state.blobs |= {f"own/{place.worker}": own for place, own in unkept}
        return state

    def heal(self, state: HealState) -> None:
        """See `Work.heal`."""
        self._trainer.heal(state)
        self.state.marks = {
            round_: Mark(history, state.blobs[f"mark/{round_}"]) for round_, history in state.meta[MARKS]
        }
        self.store.held.clear()
        for worker, round_ in state.meta[OWN]:
            self.store.hold(self.rounds.place(worker, round_), state.blobs[f"own/{worker}"])

    def close(self) -> None:
        """This group leaves: its newest states have to be on storage for those who take its workers over."""
        self.store.settle(self._ft.join_timeout_s)

    # What is the trainer's alone

    def refused(self) -> frozenset[int]:
        """See `Work.refused`: workers in whose rounds an optimizer step was refused twice."""
        return frozenset(self.rounds.refused)

    def bits(self, slot: int) -> int:
        raise NotImplementedError  # [fault_tolerance] audit_slots is refused

    def audit(self, step: int, slot: int) -> int:
        raise NotImplementedError

    def not_finite(self, step: int, slots: Collection[int]) -> None:
        self._trainer.not_finite(step, slots)

    def notes(self, step: int) -> bytes | None:
        return self._trainer.notes(step)

    def noted(self, notes: list[bytes]) -> None:
        self._trainer.noted(notes)

    def settle(self) -> None:
        self._trainer.settle()

    def checksum(self) -> int | None:
        return self._commits.checksum()

    def goes_on(self) -> bool:
        return self._commits.goes_on()

    def save_last(self) -> None:
        self._commits.save_last()


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
