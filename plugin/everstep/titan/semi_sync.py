"""A torchtitan trainer whose commits are rounds: local SGD and DiLoCo on the step protocol.

To the protocol a worker's round is what a slot is: `compute(t, m)` is worker m's H optimizer steps of round t, from the
global parameters and its own inner optimizer state, on its own slots; the reducer sums what the workers changed, and
the commit is the outer step. What a worker computes depends on nothing else, so it may be computed by any group, and
again. The inner states that the round ends with travel beside the sums, and each group keeps all of them (`rounds`).
"""

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from everstep.quorum.heal import HealState
from everstep.run.exits import USAGE_EXIT
from everstep.semi.outer import OuterSGD
from everstep.semi.rounds import pack, slots_of, steps_of, unpack
from everstep.step.interfaces import Commit, SlotSums, SumsBroken
from everstep.step.reduction import local
from everstep.titan.rounds import OPTIMIZER, RoundState
from everstep.titan.trainer import OPTIMIZER_SLOT, EverstepTrainer, logger

CHECKPOINT = "semi_sync"


@dataclass(frozen=True, slots=True)
class WorkerRound:
    """What a worker's round came to, besides what it changed.

    Attributes:
        tokens, loss: valid tokens and sum of their losses by optimizer step, float64 [H].
        inner: this rank's inner state after it.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    inner: bytes


class SemiSyncTrainer(EverstepTrainer):
    """The step protocol's Work where a commit is a round of `[semi_sync]` workers.

    `self.step` counts optimizer steps of a worker, as torchtitan does: learning rate, checkpoints and validation go by
    it. Commits and events count rounds.
    """

    def _prepare(self, config: EverstepTrainer.Config) -> None:
        super()._prepare(config)
        settings = config.semi_sync
        self.workers = settings.workers or config.fault_tolerance.groups
        self.sync_steps = settings.sync_steps
        if self.slots % self.workers:
            self._refuse(f"the {self.slots} slots of a step cannot be split among {self.workers} workers")
        if self.expert_loads:
            self._refuse("models with experts are not supported: their balance is no optimizer's")
        self._require_memory()
        self.open_step(self.tokens_per_step / self.workers)
        self._outer = OuterSGD.of(settings)
        parts = (self.model_parts, self.optimizers, self.lr_schedulers, self)
        self.round = RoundState(*parts, workers=self.workers, momentum=self._outer.momentum != 0)
        self.state = self.round
        self._changed = [torch.zeros_like(param) for param in self.trainable]
        """What the held workers have changed, summed over them."""
        self._held: dict[int, WorkerRound] = {}
        self._arrived: dict[int, dict[int, memoryview]] = {}
        """By round the inner state of every worker after it, for a commit that may follow."""
        self._noting = self._counted_bytes = 0
        # pyrefly: ignore[missing-attribute] every manager of torchtitan has states, if it is enabled
        self._saved = self.checkpointer.states if config.checkpoint.enable else {}
        self._saved[CHECKPOINT] = self.round

    def _require_memory(self) -> None:
        """Refuse to start with more workers than this rank has memory for."""
        held = self.state.tensors()
        inner = self.workers * sum(tensor.nbytes for name, tensor in held.items() if name.startswith(OPTIMIZER))
        on_cpu = self.device.type == "cpu"
        # Global parameters, momentum, changes and their sums; on the host the inner states once more while they travel.
        needed = 4 * sum(tensor.nbytes for name, tensor in held.items() if name.startswith("param/")) + inner
        needed += 2 * inner if on_cpu else 0
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
        return self.step // self.sync_steps

    @property
    def shares(self) -> int:
        return self.workers

    @property
    def samples(self) -> int:
        return super().samples * self.sync_steps

    @property
    def longest_sum_s(self) -> float:
        # Groups that began a round together need not end it within the time of a step. Whoever waits longer would be
        # taken for stalled.
        return max(super().longest_sum_s, 0.8 * self._ft.stall_timeout_s)

    # A worker's round

    def compute(self, step: int, slot: int) -> None:
        round_, worker = step, slot
        self.checkpointer.maybe_wait_for_staging()  # it reads what changes now
        tokens, loss = torch.zeros(2, self.sync_steps, dtype=torch.float64)
        self.round.enter(worker)
        try:
            for index, inner_step in enumerate(steps_of(round_, self.sync_steps)):
                tokens[index], loss[index] = self._inner_step(round_, inner_step, worker)
            with torch.no_grad():
                for changed, before, param in zip(self._changed, self.round.trained, self.trainable, strict=True):
                    local(changed).add_(before - local(param))
            self._held[worker] = WorkerRound(tokens, loss, self.round.live_inner())
        finally:
            self.round.rest()
        for param, changed in zip(self.trainable, self._changed, strict=True):
            param.grad = changed
        self.events.emit("worker_round", round_, worker=worker, losses=(loss / tokens).tolist())

    def _inner_step(self, round_: int, inner_step: int, worker: int) -> tuple[float, float]:
        """One optimizer step of a worker; its valid tokens and the sum of their losses."""
        self.optimizers.zero_grad()
        for slot in slots_of(worker, self.slots, self.workers):
            self.files.computes(round_, worker)
            self.compute_slot(inner_step, slot)
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

    def results(self) -> SlotSums:
        tokens, loss = torch.zeros(2, self.workers, dtype=torch.float64)
        by_step = torch.zeros(2, self.sync_steps, dtype=torch.float64)
        for worker, done in self._held.items():
            tokens[worker], loss[worker] = done.tokens.sum(), done.loss.sum()
            by_step += torch.stack([done.tokens, done.loss])
        return SlotSums(tokens, loss, by_step.flatten(), frozenset(self._held))

    def discard(self) -> None:
        self._held.clear()
        for changed in self._changed:
            local(changed).zero_()
        self.optimizers.zero_grad()

    # The inner states, beside the sums

    def notes(self, step: int) -> bytes | None:
        self._noting = step
        return pack(step, {worker: done.inner for worker, done in self._held.items()})

    def noted(self, notes: list[bytes]) -> None:
        try:
            self._arrived[self._noting] = unpack(notes, self._noting, self.workers, self.round.inner_bytes)
        except ValueError as error:
            raise SumsBroken(str(error)) from None

    # The outer step

    def update(self, commit: Commit, tokens: float) -> float:
        self.checkpointer.maybe_wait_for_staging()
        self._reducer.assign(1 / self.workers)
        norm = self.clip_gradients(float("inf"))
        grads = [local(param.grad) for param in self.trainable if param.grad is not None]
        self._outer.step(self.round.trained, grads, self.round.momentum)
        for worker, inner in self._arrived[commit.step].items():
            self.round.set_inner(worker, inner)
        self._forget(commit.step)
        self.step = commit.step * self.sync_steps
        self.ntokens_seen += self.tokens_per_step * self.sync_steps
        self.round.rest()
        return float(norm)

    def _forget(self, round_: int) -> None:
        """Inner states after this round and earlier ones are not needed any more."""
        self._arrived = {later: states for later, states in self._arrived.items() if later > round_}

    def told_of(self, commit: Commit) -> dict[str, Any]:
        tokens, loss = commit.extra.view(2, self.sync_steps)
        before, self._counted_bytes = self._counted_bytes, self.column.payload_bytes
        return {
            "inner_losses": (loss / tokens).tolist(),
            "inner_steps": self.sync_steps,
            "payload_bytes": self._counted_bytes - before,
            "gradient_bytes": sum(local(param).nbytes for param in self.trainable),
        }

    # The state

    def restore(self) -> tuple[int, int]:
        saved = {key.split(".")[2] for key in self._keys_on_disk() or () if key.startswith(f"{CHECKPOINT}.worker.")}
        if saved and len(saved) != self.workers:
            self._refuse(f"the checkpoint has {len(saved)} workers and the run {self.workers}; set workers")
        if not saved:  # none, or one of synchronous training
            del self._saved[CHECKPOINT]
        restored = super().restore()
        self._saved[CHECKPOINT] = self.round
        if self.step % self.sync_steps:
            self._refuse(f"the checkpoint is of step {self.step}, not of the end of a round of {self.sync_steps} steps")
        self.round.begin(with_workers=bool(saved))
        self.round.rest()
        return restored

    def heal(self, state: HealState) -> None:
        super().heal(state)
        self._forget(self.committed)
