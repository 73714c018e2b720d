"""A torchtitan trainer whose commits are rounds: local SGD, DiLoCo and Streaming DiLoCo on the step protocol.

To the protocol a worker's round is what a slot is: `compute(t, m)` is worker m's optimizer steps of round t, from the
global parameters and the worker's own state, on its own slots; the reducer sums what the workers changed, and the
commit is the outer step. What a worker computes depends on nothing else, so it may be computed by any group, and again.

A worker's own state stays with the group that carries the worker, and is written to the run directory while training
goes on. A group that gets a worker it did not carry takes the state from there. If it lacks the last rounds (its writer
was killed first) it makes them again: of these each group still knows the global parameters (`rounds.Mark`). With
`keep_steps` a worker's state is also written within its round, and whoever makes the round goes on from the newest.
"""

import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager

from everstep.attention.guard import Checks
from everstep.quorum.heal import HealState
from everstep.run.exits import HOPELESS_EXIT, USAGE_EXIT
from everstep.semi.outer import OuterSGD
from everstep.semi.quantize import encode
from everstep.semi.rounds import slots_of, steps_of
from everstep.semi.worker_files import Place, WorkerFiles, folder_of
from everstep.snapshot.segment import run_id
from everstep.step.interfaces import Commit, SlotRefused, SlotSums
from everstep.step.ledger import OnLoss
from everstep.step.reduction import GradientReducer, local
from everstep.titan import private
from everstep.titan.data.streams import SlotStreams
from everstep.titan.fragments import FragmentReducer, QuantizedReducer
from everstep.titan.group import all_in_group, least_in_group, sum_in_group
from everstep.titan.rounds import Mark, RoundState
from everstep.titan.trainer import OPTIMIZER_SLOT, EverstepTrainer, logger

CHECKPOINT = "semi_sync"
MARKS, OWN = "marks", "own"
POLL_S = 0.02
PATIENCE_S = 2.0
"""Least wait for a state that its group is just writing."""
WRITER_BITS = 32
MOST_STREAMS_BYTES = 64 << 20
"""Of where a worker's streams stand, in a state within a round."""


@dataclass(frozen=True, slots=True)
class WorkerRound:
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


@dataclass(slots=True)
class Progress:
    """How far a worker is within a round.

    Attributes:
        sums: valid tokens and sum of their losses by optimizer step, float64 [2, h].
        steps: how many are made.
        changes: what the worker changed of the round's fragment when that was taken, kept to be written; else empty.
        began_at, kept_at: after how many steps this group began, and the newest state stands in the run directory.
    """

    sums: torch.Tensor
    steps: int = 0
    changes: list[torch.Tensor] = field(default_factory=list)
    began_at: int = 0
    kept_at: int = 0


@dataclass(frozen=True, slots=True)
class Owned:
    """A worker's own state on this rank, after a round."""

    round: int
    state: bytes


class SemiSyncTrainer(EverstepTrainer):
    """The step protocol's Work where a commit is a round of `[semi_sync]` workers.

    `self.step` counts optimizer steps of a worker, as torchtitan does: learning rate, checkpoints and validation go by
    it. Commits and events count rounds.
    """

    asks_others = False  # what a check refuses is computed again within the round

    _reducer: FragmentReducer  # pyrefly: ignore[bad-override-mutable-attribute] of one fragment at a time

    def _prepare(self, config: EverstepTrainer.Config) -> None:
        super()._prepare(config)
        self.settings = settings = config.semi_sync
        self.workers = settings.workers or config.fault_tolerance.groups
        self.round_steps = settings.round_steps
        if self.slots % self.workers:
            self._refuse(f"the {self.slots} slots of a step cannot be split among {self.workers} workers")
        self.open_step(self.tokens_per_step / self.workers)
        self._outer = OuterSGD.of(settings)
        parts = (self.model_parts, self.optimizers, self.lr_schedulers, self)
        self.round = RoundState(*parts, settings=settings, momentum=self._outer.momentum != 0)
        self.state = self.round
        self._require_memory()
        fragments = [[self.trainable[at] for at in places] for places in self.round.fragments]
        self._reducer = FragmentReducer([self._reducer_of(params) for params in fragments])
        self._changed = [torch.zeros_like(param) for param in self.trainable]
        """What the held workers have changed, summed over them."""
        self._sent: dict[int, torch.Tensor] = {}
        """The same by worker, where it is sent in fewer bits."""
        self._held: dict[int, WorkerRound] = {}
        self._owned: dict[int, Owned] = {}
        """By worker the newest own state that this rank has."""
        self._absent: set[int] = set()
        """Workers that are not in the last commit, as their groups were lost; only with on_loss = "shrink"."""
        self._round_s = 0.0
        self._store = WorkerFiles(
            folder_of(self._run_dir),
            rank=dist.get_rank(),
            whose=f"{run_id(self._token)} {asdict(self._whose(config))}",
            nbytes=self.round.own_bytes,
            token=self._token,
            most=self._within_bytes + MOST_STREAMS_BYTES,
        )
        self._room = torch.empty(
            self._within_bytes if self.settings.keep_steps else 0,
            dtype=torch.uint8,
            pin_memory=self.device.type == "cuda",
        )
        """Where a state within a round is until it is written."""
        self._writer = sum_in_group(secrets.randbits(WRITER_BITS - 1)) % (1 << WRITER_BITS)
        self._counted_bytes = self._counted_saved = 0
        # pyrefly: ignore[missing-attribute] every manager of torchtitan has states, if it is enabled
        self._saved = self.checkpointer.states if config.checkpoint.enable else {}
        self._saved[CHECKPOINT] = self._OnDisk(self)

    def _reducer_of(self, params: list[torch.nn.Parameter]) -> GradientReducer | QuantizedReducer:
        if self.settings.quantize == "none":
            return GradientReducer(params, int(self._ft.bucket_mb * 2**20), self._streams, hooks=False)

        def offered() -> dict[int, torch.Tensor]:
            return {worker: self._sent[worker] for worker in self._held}

        return QuantizedReducer(params, offered, self.settings.quantize, self.workers)

    def _require_memory(self) -> None:
        """Refuse to start with more workers than this rank has memory for."""
        params = sum(local(param).nbytes for param in self.trainable)
        carried = -(-self.workers // self._ft.groups)
        own, on_cpu = self.round.own_bytes, self.device.type == "cpu"
        marks = (2 * self.settings.keep_every + 1) * params // self.settings.fragments
        # Global parameters, momentum, changes and their sums; a checkpoint has all workers.
        needed = 4 * params + (self.workers * own if self.config.checkpoint.enable else 0)
        needed += 2 * carried * own + marks if on_cpu else 0
        if self.settings.keep_steps:
            needed += 2 * self._within_bytes if on_cpu else 0  # one is written, one may be read
            needed += params // self.settings.fragments if self.settings.overlap_steps else 0
        free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info(self.device)[0]
        if needed > free:
            self._refuse(
                f"the states of {self.workers} workers need {needed / 2**30:.1f} GiB on each rank, and "
                f"{free / 2**30:.1f} GiB are free: take fewer workers, or more ranks in a group"
            )

    def _refuse(self, why: str) -> None:
        logger.error(f'[semi_sync] method = "{self.config.semi_sync.method}": {why}')
        raise SystemExit(USAGE_EXIT)

    def _backward_runs_hooks(self) -> bool:
        return False  # what is summed is there at the end of a round

    @property
    def committed(self) -> int:
        return self.step // self.round_steps

    @property
    def shares(self) -> int:
        return self.workers

    @property
    def on_loss(self) -> OnLoss:
        return "shrink" if self.settings.on_loss == "shrink" else "redistribute"

    @property
    def homes(self) -> int:
        return self._ft.groups

    @property
    def notes_interval(self) -> int:
        return 1

    @property
    def samples(self) -> int:
        return super().samples * self.round_steps

    @property
    def longest_sum_s(self) -> float:
        # Groups that began a round together need not end it within the time of a step. Whoever waits longer would be
        # taken for stalled.
        return max(super().longest_sum_s, 0.8 * self._ft.stall_timeout_s)

    # A worker's round

    def compute(self, step: int, slot: int) -> None:
        round_, worker = step, slot
        self.checkpointer.maybe_wait_for_staging()  # it reads what changes now
        within = self._newest_within(round_, worker)
        own = self._own_state(worker) if within is None else b""
        begun = time.monotonic()
        try:
            if within is None:
                self._enter(own, round_ - 1)
                progress = self._progress()
            else:
                progress = self._go_on(round_, worker, *within)
            self._inner_steps(round_, worker, progress, synchronises=True)
            tokens, loss = progress.sums
            self._held[worker] = WorkerRound(tokens, loss, _flat(self.round.balances), self.round.leave())
        finally:
            self._rest()
        self._offer(round_)
        if not progress.began_at:
            self._round_s = time.monotonic() - begun
        losses = (loss / tokens).tolist()
        self.events.emit("worker_round", round_, worker=worker, losses=losses, from_step=progress.began_at)

    def _enter(self, own: bytes, round_: int) -> None:
        """See `RoundState.enter`."""
        self.round.enter(own, round_)
        if self.checks is not None:
            self.checks.weights_changed()

    def _rest(self) -> None:
        """See `RoundState.rest`."""
        self.round.rest()
        if self.checks is not None:
            self.checks.weights_changed()

    def _progress(self) -> Progress:
        return Progress(torch.zeros(2, self.round_steps, dtype=torch.float64))

    @property
    def _taken_at(self) -> int:
        """After how many of a round's steps its changes are taken: τ before the end."""
        return self.round_steps - self.settings.overlap_steps

    def _inner_steps(self, round_: int, worker: int, progress: Progress, *, synchronises: bool) -> None:
        """The rest of a worker's optimizer steps of a round; `synchronises`: what it changed is added to what is
        summed, τ steps before the end, and its state is written now and then."""
        for inner_step in steps_of(round_, self.round_steps)[progress.steps :]:
            sums = self.inner_step(round_, inner_step, worker)
            progress.sums[:, progress.steps] = torch.tensor(sums, dtype=torch.float64)
            progress.steps += 1
            if synchronises:
                if progress.steps == self._taken_at:
                    self._take_changes(round_, worker, progress)
                self._keep_within(round_, worker, progress)

    @torch.no_grad()
    def _take_changes(self, round_: int, worker: int, progress: Progress) -> None:
        """What the worker has changed of the round's fragment so far is what it synchronises."""
        before, now = self.round.trained, self.round.live
        changes: Iterable[torch.Tensor] = (before[at] - now[at] for at in self.round.fragment(round_))
        if self.settings.keep_steps and self.settings.overlap_steps:
            changes = progress.changes = list(changes)
        self._synchronise(round_, worker, changes)

    @torch.no_grad()
    def _synchronise(self, round_: int, worker: int, changes: Iterable[torch.Tensor]) -> None:
        """A worker's changes join what is summed. The sum begins if this is the group's last worker, and goes on while
        the worker makes its last steps."""
        if self.settings.quantize != "none":
            self._sent[worker] = encode(torch.cat([change.flatten() for change in changes]), self.settings.quantize)
            return
        for at, change in zip(self.round.fragment(round_), changes, strict=True):
            local(self._changed[at]).add_(change)
        if self.settings.overlap_steps:
            self._offer(round_)
            self._reducer.start()

    def _offer(self, round_: int) -> None:
        """What is summed stands where the reducer looks for gradients."""
        self.optimizers.zero_grad()
        for at in self.round.fragment(round_):
            self.trainable[at].grad = self._changed[at]

    def inner_step(self, round_: int, inner_step: int, worker: int) -> tuple[float, float]:
        """One optimizer step of a worker; its valid tokens and the sum of their losses. If an attention check refuses a
        slot, the step's gradients are computed again."""
        refused = True
        while refused:
            refused = False
            super().discard()
            for slot in slots_of(worker, self.slots, self.workers):
                self.files.computes(round_, worker)
                try:
                    self.compute_slot(inner_step, slot, self.looks(inner_step, slot))
                except SlotRefused as refusal:  # on all ranks of the group
                    self.events.emit("slot_refused", round_, slot=worker, reason=str(refusal))
                    refused = True
                    break
        sums = super().results()
        self._slot_tokens.clear()
        self._slot_losses.clear()
        tokens = float(sums.tokens.sum())
        if tokens != self.nominal_tokens:
            for param in self.trainable:
                if param.grad is not None:
                    param.grad.mul_(self.nominal_tokens / tokens)
        self.step_optimizer(inner_step, OPTIMIZER_SLOT - worker)
        return tokens, float(sums.loss.sum())

    def _judge(self, checks: Checks, step: int, slot: int, loads: list[torch.Tensor], looks: bool) -> None:
        super()._judge(checks, -(-step // self.round_steps), slot, loads, looks)  # events count rounds

    def results(self) -> SlotSums:
        tokens, loss = torch.zeros(2, self.workers, dtype=torch.float64)
        by_step = torch.zeros(2, self.round_steps, dtype=torch.float64)
        balances = torch.zeros_like(_flat(self.round.balances))
        for worker, done in self._held.items():
            tokens[worker], loss[worker] = done.tokens.sum(), done.loss.sum()
            by_step += torch.stack([done.tokens, done.loss])
            balances += done.balances
        return SlotSums(tokens, loss, torch.cat([by_step.flatten(), balances]), frozenset(self._held))

    def discard(self) -> None:
        self._held.clear()
        self._sent.clear()
        for changed in self._changed:
            local(changed).zero_()
        super().discard()

    # The workers' states within rounds

    def _place_within(self, worker: int, round_: int, steps: int = 0) -> Place:
        return Place(worker, round_, self.round.marks[round_ - 1].history, steps, self._writer)

    @property
    def _within_bytes(self) -> int:
        """Largest size of a state within a round, without what is told of streams."""
        params = max(sum(self.round.trained[at].nbytes for at in places) for places in self.round.fragments)
        return self.round.within_bytes + 16 * self.round_steps + (params if self.settings.overlap_steps else 0)

    def _keep_within(self, round_: int, worker: int, progress: Progress) -> None:
        """Every `keep_steps` steps: begin to write how far the worker is, unless the write before is not done on some
        rank. What is finished with the group's last worker of an attempt is summed at once and not written. A
        collective of the group."""
        every, ended = self.settings.keep_steps, progress.steps == self.round_steps
        if not every or progress.steps % every or (ended and self._reducer.in_last_slot):
            return
        if not all_in_group(self._store.idle):
            return
        more = [progress.sums, *(progress.changes if progress.steps > self._taken_at else ())]
        state = self.round.leave_within(self._room, more)
        streams = b""
        if isinstance(self.source, SlotStreams):
            slots = slots_of(worker, self.slots, self.workers)
            streams = self.source.states_now(map(self.source.stream_of, slots))
        place = self._place_within(worker, round_, progress.steps)
        told = {"worker": worker, "steps": progress.steps, "from_step": progress.began_at}
        self.events.emit("worker_kept", round_, **told, parent=f"{place.history:x}")
        # Of the last two one is whole on all ranks, whenever the group dies.
        parts = [state.numpy().data, memoryview(streams)]
        self._store.save_within(place, parts, keep_from=progress.kept_at)
        progress.kept_at = progress.steps

    def _newest_within(self, round_: int, worker: int) -> tuple[int, bytes] | None:
        """After how many steps of the worker's round there is a state of it, the newest of one writer that all ranks of
        the group have, and this rank's part of it; of this round of this history. A collective of the group."""
        if not self.settings.keep_steps:
            return None
        place, below = self._place_within(worker, round_), 1 << 62
        while True:
            here = {found.steps << WRITER_BITS | found.writer: found for found in self._store.within(place)}
            [newest] = least_in_group(max((at for at in here if at < below), default=0))
            if not newest:
                return None
            found = self._store.read(here[newest]) if newest in here else None
            if all_in_group(found is not None):
                assert found is not None
                return newest >> WRITER_BITS, found
            below = newest

    def _go_on(self, round_: int, worker: int, steps: int, state: bytes) -> Progress:
        """The worker is where this state of it within a round was left."""
        begun, progress = time.monotonic(), self._progress()
        progress.steps = progress.began_at = progress.kept_at = steps
        if steps > self._taken_at:
            progress.changes = [torch.empty_like(self.round.trained[at]) for at in self.round.fragment(round_)]
        more = [progress.sums, *progress.changes]
        size = self.round.within_bytes + sum(tensor.nbytes for tensor in more)
        self.round.enter_within(memoryview(state)[:size], (round_ - 1) * self.round_steps + steps, more)
        if self.checks is not None:
            self.checks.weights_changed()
        if isinstance(self.source, SlotStreams):
            self.source.go_on_from(state[size:])
        if not self.carries(worker):
            took_s = round(time.monotonic() - begun, 3)
            self.events.emit("worker_moved", round_, worker=worker, rounds_again=0, from_step=steps, took_s=took_s)
        if steps > self._taken_at:
            self._synchronise(round_, worker, progress.changes)
        elif steps == self._taken_at:
            self._take_changes(round_, worker, progress)
        return progress

    # The workers' own states

    def _place(self, worker: int, round_: int) -> Place:
        return Place(worker, round_, self.round.marks[round_].history)

    def _own_state(self, worker: int) -> bytes:
        """A worker's own state after the last commit, on all ranks of the group: what this group has, what another
        group has written, or one of an earlier round with the rounds since made again. Where workers may be absent
        (`on_loss`) they are not made again, and one that was absent for longer begins anew. A collective of the
        group."""
        shrinks = self.settings.on_loss == "shrink"
        if worker not in self._absent:
            self._await(worker)
        for round_ in range(self.committed, min(self.round.marks) - 1, -1):
            found = self._found(worker, round_)
            if all_in_group(found is not None):
                break
        else:
            if shrinks:
                self.events.emit("worker_begun", self.committed + 1, worker=worker)
                return self.round.anew()
            logger.error(
                f"The state of worker {worker} is in no memory and not in {folder_of(self._run_dir)}: start the run "
                "again, and it goes on from its last checkpoint"
            )
            raise SystemExit(HOPELESS_EXIT)
        assert found is not None
        owned = self._owned.get(worker)
        if round_ == self.committed and owned is not None and owned.round == round_:
            return found
        begun = time.monotonic()
        for later in range(round_ + 1, self.committed + 1):
            self._enter(found, later - 1)
            if not shrinks:
                self._inner_steps(later, worker, self._progress(), synchronises=False)
            found = self.round.leave()
        self._owned[worker] = Owned(self.committed, found)
        again, took_s = 0 if shrinks else self.committed - round_, round(time.monotonic() - begun, 3)
        self.events.emit(
            "worker_moved", self.committed + 1, worker=worker, rounds_again=again, from_step=0, took_s=took_s
        )
        return found

    def _await(self, worker: int) -> None:
        """Another group may be writing the state at this moment. A collective of the group."""
        end = time.monotonic() + max(PATIENCE_S, self._round_s)
        while self.committed % self.settings.keep_every == 0:
            here = all_in_group(self._has(worker, self.committed))
            in_time = all_in_group(time.monotonic() < end)
            if here or not in_time:
                return
            time.sleep(POLL_S)

    def carries(self, worker: int) -> bool:
        """Whether this group has the worker's state after the last commit in memory."""
        owned = self._owned.get(worker)
        return owned is not None and owned.round == self.committed

    def _has(self, worker: int, round_: int) -> bool:
        owned = self._owned.get(worker)
        return (owned is not None and owned.round == round_) or self._store.has(self._place(worker, round_))

    def _found(self, worker: int, round_: int) -> bytes | None:
        owned = self._owned.get(worker)
        if owned is not None and owned.round == round_:
            return owned.state
        return self._store.read(self._place(worker, round_)) if round_ in self.round.marks else None

    def _keep(self) -> None:
        """After a commit: write the states of the workers that this group carries, and let go of those that it does not
        carry any more, once they are on disk."""
        round_, every = self.committed, self.settings.keep_every
        for error in self._store.failures():
            logger.warning(f"A worker's state could not be written: {error}")
            self.events.emit("worker_not_kept", round_, reason=error)
        mine = {worker: owned for worker, owned in self._owned.items() if owned.round == round_}
        if round_ % every == 0:
            states = {self._place(worker, round_): owned.state for worker, owned in mine.items()}
            self._store.save(states, keep_from=round_ - 2 * every)
        for worker, owned in list(self._owned.items()):
            known = owned.round in self.round.marks
            later = (r for r in self.round.marks if r > owned.round)
            if not known or any(self._store.has(self._place(worker, r)) for r in later):
                del self._owned[worker]

    # The outer step

    def update(self, commit: Commit, tokens: float) -> float:
        self.checkpointer.maybe_wait_for_staging()
        self._offer(commit.step)  # for its memory
        weights = self._weights(commit)
        self._absent = {worker for worker, weight in enumerate(weights) if not weight}
        self._reducer.assign(max(weights))
        norm = self.clip_gradients(float("inf"))
        places, trained, momentum = self.round.fragment(commit.step), self.round.trained, self.round.momentum
        self._outer.step(
            [trained[at] for at in places],
            [local(grad) for at in places if (grad := self.trainable[at].grad) is not None],
            [momentum[at] for at in places] if momentum else [],
        )
        for worker, done in self._held.items():
            self._owned[worker] = Owned(commit.step, done.own)
        self.step = commit.step * self.round_steps
        self.ntokens_seen += self.tokens_per_step * self.round_steps
        self.round.balance(commit.extra[2 * self.round_steps :] * max(weights))
        self.round.mark(commit.step, commit.history)
        self._rest()
        self._keep()
        return float(norm)

    def _weights(self, commit: Commit) -> list[float]:
        """Of each worker's change in the outer step: equal for all workers that are in the commit."""
        there = [owner >= 0 for owner in commit.owners]
        return [float(is_there) / sum(there) for is_there in there]

    def told_of(self, commit: Commit) -> dict[str, Any]:
        tokens, loss = commit.extra[: 2 * self.round_steps].view(2, self.round_steps)
        before, self._counted_bytes = self._counted_bytes, self.column.payload_bytes
        saved, self._counted_saved = self._counted_saved, self._store.written_bytes
        return {
            "inner_losses": (loss / tokens).tolist(),
            "inner_steps": self.round_steps,
            "weights": self._weights(commit),
            "payload_bytes": self._counted_bytes - before,
            "kept_bytes": self._counted_saved - saved,
            "gradient_bytes": sum(local(param).nbytes for param in self.trainable),
        }

    # The state

    class _OnDisk:
        """What torchtitan's checkpoints have besides its own: a `Stateful`."""

        def __init__(self, trainer: "SemiSyncTrainer") -> None:
            self._trainer = trainer

        def state_dict(self) -> dict[str, Any]:
            own = {worker: owned.state for worker, owned in self._trainer._owned.items()}
            return self._trainer.round.on_disk(
                {worker: own.get(worker, b"") for worker in range(self._trainer.workers)}
            )

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            trainer = self._trainer
            states = trainer.round.from_disk(state_dict, range(trainer.workers))
            trainer._owned = {worker: Owned(-1, state) for worker, state in states.items()}

    def _save(self, *, last: bool = False) -> None:
        """All workers are in a checkpoint; torchtitan's own part of it has the optimizer of worker 0."""
        manager, known = self.checkpointer, dict(self._owned)
        due = False
        if isinstance(manager, CheckpointManager) and manager.enable:
            due = not manager.last_save_model_only if last else private.is_due(manager, self.step)
        if due:
            for worker in range(self.workers):
                self._owned[worker] = Owned(self.committed, self._own_state(worker))
            self._enter(self._owned[0].state, self.committed)
            self._rest()
        super()._save(last=last)
        self._owned = known

    def restore(self) -> tuple[int, int]:
        saved = {key.split(".")[2] for key in self._keys_on_disk() or () if key.startswith(f"{CHECKPOINT}.worker.")}
        if saved and len(saved) != self.workers:
            self._refuse(f"the checkpoint has {len(saved)} workers and the run {self.workers}; set workers")
        on_disk = self._saved.pop(CHECKPOINT)
        if saved:  # if not: none, or one of synchronous training
            self._saved[CHECKPOINT] = on_disk
        restored = super().restore()
        self._saved[CHECKPOINT] = on_disk
        if self.step % self.settings.sync_steps:
            self._refuse(
                f"the checkpoint is of step {self.step}, not of the end of a round of {self.settings.sync_steps} steps"
            )
        self.round.begin()
        states = {worker: owned.state for worker, owned in self._owned.items()}
        if not saved:
            self.round.forget_momentum()
            states = dict.fromkeys(range(self.workers), self.round.leave())
        self._owned = {worker: Owned(self.committed, state) for worker, state in states.items()}
        self.round.marks.clear()
        self.round.mark(self.committed, self.history)
        self._rest()
        # No group has a state: these are of a life before, of which only the checkpoint is believed.
        self._store.forget_within()
        return restored

    def serve(self) -> HealState:
        """Also what a joiner needs to take workers over, and the own states that are nowhere else but here yet."""
        state = super().serve()
        unkept = {
            worker: owned
            for worker, owned in self._owned.items()
            if owned.round in self.round.marks and not self._store.has(self._place(worker, owned.round))
        }
        state.meta[MARKS] = [[round_, mark.history] for round_, mark in self.round.marks.items()]
        state.meta[OWN] = [[worker, owned.round] for worker, owned in unkept.items()]
        state.blobs |= {f"mark/{round_}": mark.merged for round_, mark in self.round.marks.items()}
        state.blobs |= {f"own/{worker}": owned.state for worker, owned in unkept.items()}
        return state

    def heal(self, state: HealState) -> None:
        super().heal(state)
        self.round.marks = {
            round_: Mark(history, state.blobs[f"mark/{round_}"]) for round_, history in state.meta[MARKS]
        }
        self._owned = {worker: Owned(round_, state.blobs[f"own/{worker}"]) for worker, round_ in state.meta[OWN]}


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Their values end to end, float64 on the CPU."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.detach().flatten().double().cpu() for t in tensors)])
