"""Rounds of local SGD, DiLoCo and Streaming DiLoCo. In semi-synchronous training a commit is a round.

The step protocol treats a worker's round like a slot: `compute(t, m)` makes worker m's optimizer steps of round t, from
the global parameters and the worker's own state, on its own slots. The reducer sums the workers' parameter changes, and
the commit is the outer step. A worker's round depends on nothing else, so any group can compute it, also repeatedly.

A worker's own state stays with the group that carries the worker. While training goes on, it is written to the host's
memory, where a keeper serves it, and copied to another host's memory or to storage. A group that takes over a worker
reads its newest state there and makes the rounds since then again. That is possible because each group still knows the
global parameters after each of the last rounds (`round_state.Mark`).
"""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everstep.quorum.heal import HealState
from everstep.quorum.request import Quorum
from everstep.run.directory import ended_file
from everstep.run.exits import HOPELESS_EXIT, USAGE_EXIT, TrainerEnds
from everstep.semi.outer import outer_step
from everstep.semi.section import SemiSync
from everstep.semi.worker_store import StateKey, WorkerStore
from everstep.snapshot.keepers import KeeperWatch, end_keepers
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from everstep.snapshot.worker_states import WorkerStates
from everstep.step import exact
from everstep.step.holding import FINDINGS, NOT_FINITE
from everstep.step.interfaces import Commit, SlotSums
from everstep.step.private import local
from everstep.step.reduction import BUCKET_BYTES, LARGEST_PART, GradientReducer, all_within
from everstep.titan.disk import not_saved
from everstep.titan.group import all_in_group, gather_json, least_in_group, sum_in_group
from everstep.titan.parts import WORKERS, Parts
from everstep.titan.round_state import RoundState, packed
from everstep.titan.slot_computer import OPTIMIZER_SLOT
from everstep.titan.tally import flat
from everstep.titan.work import TrainerWork

OWN = "own"
POLL_S = 0.02
PATIENCE_S = 2.0
"""Shortest time limit, in seconds, of the wait for a state that another group may be writing."""


class Rounds(TrainerWork):
    """Computes workers' rounds and applies outer steps, as an `everstep.step.interfaces.Work`. Commits and events count
    rounds. `trainer.step` counts the optimizer steps of a worker, as torchtitan does; learning rate, checkpoints and
    validation follow it.

    Args:
        trainer: an `EverstepTrainer` whose slots, disk and other parts that this class uses are already built.
    """

    state: RoundState  # pyrefly: ignore[bad-override-mutable-attribute] it is set once

    def __init__(self, trainer: Any) -> None:
        slots = trainer.slots
        self._settings: SemiSync = trainer.config.semi_sync
        self._steps = self._settings.round_steps
        state = RoundState(trainer)
        reducer = GradientReducer(
            slots.trainable,
            BUCKET_BYTES,
            trainer.streams,
            hooks=False,
            exact_slots=slots.workers if trainer.config.fault_tolerance.exact else 0,
            fragments=state.fragments,
        )
        super().__init__(trainer, state, slots.workers, reducer)
        if slots.number % self.shares:
            self._refuse(f"workers = {self.shares} must be a divisor of the number of slots, {slots.number}")
        run, settings = trainer.context, Snapshot.of(trainer.config.snapshot)
        segment = Segment.of(settings, run_id(run.token), self._ft.group_id)
        failed = lambda why: self._events.emit("warning", text=f"workers' states are not in this host's memory: {why}")  # noqa: E731
        self._keeper = KeeperWatch.of_first(run.run_dir, run.host, settings, segment, self._events, failed)
        self.store = WorkerStore(
            WorkerStates(run.run_dir, segment),
            rank=dist.get_rank(),
            whose=trainer.participation.whose,
            nbytes=len(state.own_state()),
            token=run.token,
        )
        self._held: dict[int, tuple[float, float, torch.Tensor, bytes]] = {}
        """Worker -> its round's valid tokens, the sum of their losses, and this rank's parts of the balances and of the
        worker's own state after the round."""
        self._refused: set[int] = set()
        """Workers with an optimizer step that was refused twice, in this round or in a round that was made again."""
        self._not_finite: set[int] = set()
        """Those of them that have no such step to go on from, because a loss or a gradient was not finite."""
        self._changed = [torch.zeros_like(param) for param in slots.trainable]
        """The parameter changes of all workers held in this round, summed; with exact sums, of the current worker."""
        self._round_s = 0.0
        self._told_short = False
        self._risk = ""
        """The failure that would end the run now, e.g. "group 1 dies"; empty if no single one would."""
        self._counted_saved = self._counted_sent = 0
        on_complete = lambda step: self._events.emit("checkpoint_saved", step // self._steps)  # noqa: E731
        self.parts = Parts(self.shares, lambda: trainer.history, on_complete)
        self._disk.states[WORKERS] = self

    def _refuse(self, why: str) -> None:
        raise TrainerEnds(USAGE_EXIT, f'[semi_sync] method = "{self._settings.method}": {why}')

    # A worker's round

    def compute(self, step: int, slot: int, *, check_all: bool) -> None:
        """Compute a worker's round. `step` is the number of the round, `slot` that of the worker."""
        round_, worker, begun = step, slot, time.monotonic()
        self._trainer.checkpointer.maybe_wait_for_staging()  # staging reads tensors that change below
        try:
            self.state.begin_round_after(self._take_up(round_, worker, check_all=check_all), self.committed)
            tokens, loss = self._inner_steps(round_, worker, check_all=check_all)
            sums = float(tokens.sum()), float(loss.sum())
            self._held[worker] = *sums, flat(self.state.balances), self.state.own_state()
        finally:
            self.state.use_global()
        self._offer(round_)
        self._round_s = time.monotonic() - begun
        self._tell_short_timeouts()
        losses = (loss / tokens).tolist()
        self._events.emit("worker_round", round_, worker=worker, losses=losses)

    def _tell_short_timeouts(self) -> None:
        """Warn, once, of timeouts that are too short for this worker's round."""
        rounds = {"join_timeout_s": 1, "stall_timeout_s": 2}  # that each has to outlast
        short = {key: n for key, n in rounds.items() if getattr(self._ft, key) < n * self._round_s}
        if short and not self._told_short and dist.get_rank() == 0:
            self._told_short = True
            wanted = ", ".join(f"{key} = {2 * n * self._round_s:.0f}" for key, n in short.items())
            text = f"a worker's round takes {self._round_s:.1f} s, too long for [fault_tolerance] {', '.join(short)}"
            loss = "when a group dies, another that still computes may be left out, and compute its round again"
            self._events.emit("warning", text=f"{text}: {loss}. Set {wanted}")

    def _take_up(self, round_: int, worker: int, *, check_all: bool) -> bytes:
        """Return this rank's part of the own state with which a worker begins the round. A collective of the group."""
        begun, key = time.monotonic(), self.state.key(worker, self.committed)
        held, own = self.store.held.get(worker, (None, b""))
        if all_in_group(held == key):  # after a heal, one rank may hold the state and another find it in a file
            return own
        own, again = self._own(worker, check_all=check_all)
        if worker not in self._refused:
            self.store.hold(key, own)
            took_s = round(time.monotonic() - begun, 3)
            if again:  # no other group has this state; if lost again, it would take even more repeated rounds
                self.store.begin_write(key, own)
            self._events.emit("worker_moved", round_, worker=worker, rounds_again=again, took_s=took_s)
            if self.committed and self._disk.is_due(self._trainer.step):
                self._add_missing([worker])
        return own

    def _own(self, worker: int, *, check_all: bool = False) -> tuple[bytes, int]:
        """Return this rank's part of a worker's own state after the last commit, and how many rounds since the newest
        state found were made again for it. The result must not be used if the worker is in `_refused` afterwards. A
        collective of the group."""
        newest, own = self._newest(worker)
        for round_ in range(newest + 1, self.committed + 1):
            self.state.begin_round_after(own, round_ - 1)
            self._inner_steps(round_, worker, check_all=check_all)
            own = self.state.own_state()
        return own, self.committed - newest

    def _newest(self, worker: int) -> tuple[int, bytes]:
        """Return the round of the worker's newest own state of the current history that all ranks can read, and this
        rank's part of it. End the run and raise TrainerEnds if there is none. A collective of the group."""
        end = time.monotonic() + max(PATIENCE_S, self._round_s)
        for round_ in sorted(self.state.marks, reverse=True):
            if (state := self._read(self.state.key(worker, round_), end)) is not None:
                return round_, state
        why = (
            f"the state of worker {worker} is lost: the group that carried it died or left, and its states after "
            f"rounds {min(self.state.marks)} to {self.committed} are neither in a host's memory nor on storage. Start "
            "the run again to continue from its last checkpoint"
        )
        self._files.end_run(why)
        raise TrainerEnds(HOPELESS_EXIT, why)

    def _read(self, key: StateKey, end: float) -> bytes | None:
        """Return this rank's part of a state if all ranks can read theirs, else None. Until `end` (time.monotonic()),
        another group may be writing it. A collective of the group."""
        state: bytes | None = None
        while True:
            state = state or self.store.read(key) or self._from_checkpoint(key)
            is_read, in_time = least_in_group(state is not None, time.monotonic() < end)
            if is_read or not in_time:
                return state if is_read else None
            time.sleep(POLL_S)

    def _in_checkpoint(self, round_: int) -> dict[int, Path]:
        """Return worker -> folder of its state in a checkpoint after this round, one of the state's `marks`."""
        return self._disk.workers(round_ * self._steps, self.state.marks[round_].history)

    def _from_checkpoint(self, key: StateKey) -> bytes | None:
        folder = self._in_checkpoint(key.round).get(key.worker)
        into = {f"{WORKERS}.{name}": t for name, t in self.state.on_disk(key.worker).items()} if folder else {}
        return packed(into.values()) if folder and self._disk.read(folder, into) else None

    def _inner_steps(self, round_: int, worker: int, *, check_all: bool) -> torch.Tensor:
        """Make a worker's optimizer steps of a round. If the round is not made again, add its parameter changes to the
        group's sum τ steps before the end. Return valid tokens and the sum of their losses by step, float64 [2, h]."""
        sums = torch.zeros(2, self._steps, dtype=torch.float64)
        last = self._steps - self._settings.overlap_steps
        for made in range(1, self._steps + 1):
            inner_step = (round_ - 1) * self._steps + made
            sums[:, made - 1] = torch.tensor(self._inner_step(round_, inner_step, worker, check_all=check_all))
            if round_ > self.committed and made == last:
                self._synchronise(round_)
        return sums

    @torch.no_grad()
    def _synchronise(self, round_: int) -> None:
        """Add the worker's changes of the round's fragment so far to `_changed`. With τ > 0, `reducer.start` begins the
        sum over groups if this is the group's last worker; the sum runs while that worker makes its last τ steps."""
        before, now = self.state.trained, self.state.in_model
        for at in self.state.fragment_of(round_):
            local(self._changed[at]).add_(before[at] - now[at])
        if self._settings.overlap_steps:
            self._offer(round_)
            self.reducer.start()

    def _offer(self, round_: int) -> None:
        """Set `param.grad` to `_changed` for the parameters of the round's fragment, and to None for all others."""
        for param in self._slots.trainable:
            param.grad = None
        for at in self.state.fragment_of(round_):
            self._slots.trainable[at].grad = self._changed[at]

    def _inner_step(self, round_: int, inner_step: int, worker: int, *, check_all: bool) -> tuple[float, float]:
        """Make one optimizer step of a worker; return its valid tokens and the sum of their losses. If a check refuses
        a slot, or its loss or gradients are not finite, compute it again with every check. After a second refusal the
        worker is in `_refused`. If it is in `_not_finite` too, it makes no step, and the loss is NaN."""
        slots = self._slots
        each = slots.number // slots.workers
        for again in (False, True):
            slots.discard()
            for slot in range(worker * each, (worker + 1) * each):
                self._files.beat("compute", inner_step, slot)
                slots.compute(inner_step, slot, check_all=again or check_all)
            by_slot, loss = slots.tokens_and_losses()
            grads = (local(param.grad) for param in slots.trainable if param.grad is not None)
            finite = bool(loss.isfinite().all()) and all_within(LARGEST_PART, grads)
            finite, passed = least_in_group(finite, not slots.refused())
            if finite and passed:
                break
            reason = FINDINGS if finite else NOT_FINITE
            if again:
                self._refused.add(worker)
                self._not_finite |= set() if finite else {worker}
            else:
                self._events.emit("slot_refused", round_, slot=worker, reason=reason)
        tokens = float(by_slot.sum())
        if worker in self._not_finite:
            return tokens, math.nan
        if tokens and tokens != slots.nominal_tokens:  # with no valid token all gradients are 0
            for param in slots.trainable:
                if param.grad is not None:
                    param.grad.mul_(slots.nominal_tokens / tokens)
        slots.optimizer_step(inner_step, OPTIMIZER_SLOT - worker)
        return tokens, float(loss.sum())

    # The round

    def refused(self) -> frozenset[int]:
        return frozenset(self._refused)

    def results(self) -> SlotSums:
        """Return tokens and losses by worker; in `extra` the sum of the balances of all held workers."""
        tokens, loss = torch.zeros(2, self.shares, dtype=torch.float64)
        balances = torch.zeros_like(flat(self.state.balances))
        for worker, (valid, its_loss, made, _) in self._held.items():
            tokens[worker], loss[worker] = valid, its_loss
            balances += made
        return SlotSums(tokens, loss, exact.rounded(balances), frozenset(self._held))

    def discard(self) -> None:
        """Drop all results of the round in progress."""
        self._held.clear()
        self._refused.clear()
        self._not_finite.clear()
        for changed in self._changed:
            local(changed).zero_()
        self._slots.discard()

    def update(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        """Make the outer step: update the global parameters with the mean of the workers' changes."""
        self._trainer.checkpointer.maybe_wait_for_staging()
        self.reducer.assign(1 / self.shares)
        norm = self._slots.clip(float("inf"))
        places, trained, momentum = self.state.fragment_of(commit.step), self.state.trained, self.state.momentum
        outer_step(
            self._settings,
            [trained[at] for at in places],
            [local(grad) for at in places if (grad := self._slots.trainable[at].grad) is not None],
            [momentum[at] for at in places] if momentum else [],
        )
        self.state.set_balances(commit.extra / self.shares)
        self.state.add_mark(commit.step, commit.history)
        for worker, (*_, own) in self._held.items():
            self.store.hold(self.state.key(worker, commit.step), own)
        self.state.use_global()
        self._keep(commit.step)
        saved, self._counted_saved = self._counted_saved, self.store.copied_bytes
        sent, self._counted_sent = self._counted_sent, self._trainer.participation.column.payload_bytes
        return float(norm), {
            "inner_steps": self._steps,
            "payload_bytes": self._counted_sent - sent,
            "kept_bytes": self._counted_saved - saved,
            "gradient_bytes": sum(local(param).nbytes for param in self._slots.trainable),
        }

    def _keep(self, round_: int) -> None:
        """After a commit, begin to write the states of the workers that this group carries, and drop the states that
        are no longer needed. Emit an event when one more failure would end the run, and when it no longer would. A
        collective of the group."""
        self.store.drop_old(self.state.key(worker, r) for worker in range(self.shares) for r in self.state.marks)
        self._files.beat("keep", round_)
        # The other groups wait at most join_timeout_s for this one.
        why = self.store.begin_writes(round_, 0.0 if self._risk else self._ft.join_timeout_s)
        dies = "the host of group {} is lost" if self.store.has_memory else "group {} dies"
        # Ranks may be on different hosts, each with its own part of the states.
        risks = ((told, dies) for told, dies in gather_json([why, dies.format(self._ft.group_id)]) if told)
        why, risk = next(risks, ("", ""))
        if risk and risk != self._risk:
            self._events.emit("workers_unprotected", round_, reason=why, risk=risk)
        elif self._risk and not risk:
            self._events.emit("workers_protected", round_)
        self._risk = risk

    # The state

    def restore(self, quorum: Quorum) -> tuple[int, int]:
        """See `Work.restore`. Raises TrainerEnds if a worker's state was lost, or if the checkpoint does not fit."""
        if why := self._files.why_run_ended():
            first = f"rm {ended_file(self._trainer.context.run_dir)}"
            raise TrainerEnds(HOPELESS_EXIT, f"{why} (With torchrun, run this first: {first})")
        saved = self._disk.workers_to_load()
        if not all_in_group(saved in (0, self.shares)) and self._disk.leave_out_damaged():
            saved = self._disk.workers_to_load()
        if saved and saved != self.shares:
            self._refuse(f"the checkpoint has {saved} workers, but the run has {self.shares}: set workers = {saved}")
        if saved and (wrote := self._disk.rounds_to_load() or self._settings.needs) != self._settings.needs:
            self._refuse(
                f"the checkpoint's workers need {wrote}, and the run has {self._settings.needs}: set the same, or load "
                "its global parameters alone ([checkpoint] initial_load_path with initial_load_model_only = true)"
            )
        if not saved:  # there is no checkpoint, or synchronous training wrote it
            del self._disk.states[WORKERS]
        round_, history = super().restore(quorum)
        self._disk.states[WORKERS] = self
        if self._trainer.step % self._steps:
            self._refuse(f"the checkpoint's step {self._trainer.step} is not the end of a round of {self._steps} steps")
        self.state.set_global()
        self.state.add_mark(round_, history)
        own = self.state.own_state()
        for worker in () if saved else range(self.shares):
            self.store.hold(self.state.key(worker, round_), own)
        self.state.use_global()
        return round_, history

    # Checkpoints

    def _save(self, commit: Commit, *, first: bool) -> None:
        """Write this group's part of a checkpoint, if one is due or `save_last` follows this commit."""
        super()._save(commit, first=first)
        ends = commit.all_leave or not self.goes_on()
        writes = self._disk.saves_all() if ends else self._disk.is_due(self._trainer.step)
        if writes and not first and (part := self._carried()):
            self._disk.save(self._trainer.step, commit.step, part=part)

    def save_last(self) -> None:
        super().save_last()
        if self._disk.saves_all():
            self._add_missing(range(self.shares), last=True)
            self._disk.require_whole(self._trainer.step, self._trainer.history)

    def _add_missing(self, workers: Iterable[int], *, last: bool = False) -> None:
        """For each of these workers that the last commit's checkpoint lacks, for instance because its group died, write
        its own state to the checkpoint. A collective of the group."""
        written = self._in_checkpoint(self.committed)
        for worker in workers:
            if sum_in_group(worker not in written):
                own = self._caught_up(worker)
                self._disk.save(self._trainer.step, self.committed, last=last, part=self.state.on_disk(worker, own))

    def _caught_up(self, worker: int) -> bytes:
        """Return a worker's own state after the last commit; the model has the global parameters then. A collective of
        the group. Raises CheckpointException if the checks refuse an optimizer step of it twice."""
        own, _ = self._own(worker)
        self.state.use_global()
        if worker in self._refused:
            self._refused.discard(worker)
            self._not_finite.discard(worker)
            raise not_saved(f"a check refuses the state of worker {worker}")
        return own

    def _carried(self) -> dict[str, torch.Tensor]:
        """Return the own states of the workers that this group carries, by name. A collective of the group."""
        found: dict[str, torch.Tensor] = {}
        held = least_in_group(*(self.store.holds(worker, self.committed) for worker in range(self.shares)))
        for worker in (worker for worker, is_held in enumerate(held) if is_held):
            found |= self.state.on_disk(worker, self.store.held[worker][1])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the outer momentum and the carried workers' own states; leave worker 0's optimizer in the trainer, for
        torchtitan to save. Before a state is restored, return the momentum to load into. A collective of the group."""
        if not self.state.marks:
            return dict(self.state.outer)
        self.state.begin_round_after(self._caught_up(0), self.committed)
        self.state.use_global()
        return self.state.outer | self._carried()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: a checkpoint is loaded into the tensors that `state_dict` returned, which are the momentum."""

    def serve(self) -> HealState:
        """Return the state for a joiner. It includes the workers' own states that are in no file on this host yet."""
        unkept = [(key, own) for key, own in self.store.held.values() if not self.store.in_memory(key)]
        state = super().serve()
        state.meta[OWN] = [[key.worker, key.round] for key, _ in unkept]
        state.blobs |= {f"own/{key.worker}": own for key, own in unkept}
        return state

    def heal(self, state: HealState) -> None:
        super().heal(state)
        self.store.held.clear()
        for worker, round_ in state.meta[OWN]:
            self.store.hold(self.state.key(worker, round_), state.blobs[f"own/{worker}"])

    def close(self, *, leaves: bool) -> None:
        """Wait until the files of the workers' states and the checkpoint are written: other groups need them when they
        take over this group's workers."""
        self.store.finish_copies(self._ft.join_timeout_s)
        self._trainer.checkpointer.maybe_wait_for_saving()
        super().close(leaves=leaves)
        if self._keeper is not None:
            self._keeper.end()
            if not leaves:
                end_keepers(self._trainer.context.run_dir)
