"""The trainer of one rank: its Work and its Reducer. A state is a few numbers, a gradient is a count of slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from everstep.step import ledger
from everstep.step.interfaces import Commit, OutOfData, SlotSums
from simulation import real
from simulation.judge import ASKED, START, Contribution, State, fold
from simulation.services import Summed

if TYPE_CHECKING:
    from simulation.groups import Rank
    from simulation.world import World

GARBAGE, WRONG = -1, -2
"""Slot numbers that mark a gradient that is not finite, and one that is wrong but finite."""
NOTES_EVERY = 4
FIRST = 3.0
"""Largest factor by which the first slot after a start takes longer: it compiles, and fills caches."""
STATE_WORDS = 3900
"""Words of a state in transfer: four pieces, the last of which is shorter."""


class DiskFull(OSError):
    """The last checkpoint cannot be written."""


def tokens_of(step: int, slot: int) -> float:
    return 10.0 + slot + step % 3


@cache
def sums_of(step: int, done: frozenset[int], slots: int) -> SlotSums:
    """Return what a rank that has done these slots says of them."""
    tokens = torch.tensor([slot in done and tokens_of(step, slot) for slot in range(slots)], dtype=torch.float64)
    return SlotSums(tokens, tokens * 0.5, torch.tensor([float(len(done))], dtype=torch.float64), done)


class SimReducer:
    """The Reducer. A sum is the list of the contributions to it."""

    def __init__(self, work: SimWork) -> None:
        self._work = work
        self._sums: Any = None
        self._timeout = timedelta(0)
        self.total: list[Contribution] = []
        self.takes = True
        """Whether gradients that are computed now become part of the sum."""

    def begin(self, sums: Any, timeout: timedelta, step: int = 0) -> None:
        self._sums, self._timeout = sums, timeout
        self.total = []

    def begin_slot(self, *, last: bool) -> None:
        self.takes = True

    def begin_audit(self) -> None:
        self.takes = False

    def end_slot(self) -> None: ...

    def forget(self) -> None: ...

    def finish(self) -> None:
        work = self._work
        summed = Summed(Contribution(work.rank.life.group.id, tuple(sorted(work.gradient.items())), work.state))
        self._sums.finish(self._sums.start(summed, self._timeout))
        self.total = summed.all
        work.judge.summed(self.total)

    def finite(self) -> bool:
        return not any(slot == GARBAGE for part in self.total for (_, slot), _ in part.slots)

    def own_finite(self) -> bool:
        return not any(slot == GARBAGE for _, slot in self._work.gradient)

    nbytes = 1

    def stash(self) -> list[Contribution]:
        return list(self.total)

    def unstash(self, stashed: list[Contribution]) -> None:
        self.total = stashed


class SimWork:
    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self.rank, self.judge = world, rank, world.judge
        self._memory = torch.zeros(STATE_WORDS, dtype=torch.int64)
        self._words = self._memory.numpy()
        self.state = START
        self.has_state = False
        self.gradient: Counter[tuple[int, int]] = Counter()
        self.done: set[int] = set()
        self.reducer = SimReducer(self)
        self._computed = self._last_saves = 0
        self._bits = 0
        self.refuses: set[int] = set()
        self._given_up: set[tuple[int, int, int]] = set()
        self._given_nothing: set[tuple[int, int]] = set()
        """Steps and slots that contribute nothing, because no group can compute them."""
        self.computed: list[int] = []
        self.recomputed: set[int] = set()
        """Slots that were discarded and then computed again since the last `attempt` event."""

    def _together(self, *what: Any) -> list[Any]:
        return self.rank.life.work.meet(self.rank.number, what, None)

    def _same(self, *what: Any) -> None:
        """Note a call that all ranks of the group make in the same order."""
        self.rank.life.work.note(self.rank.number, what)

    def compute(self, step: int, slot: int, *, check_all: bool) -> None:
        world, life = self._world, self.rank.life
        self._same("compute", step, slot, check_all)
        plan = world.plan
        if (step, slot) >= plan.data_ends:
            raise OutOfData
        if (step, slot) in self.gradient:
            world.judge.violate("slot added twice", f"{self.rank.name} computes {step, slot}, which it holds")
        if self.rank.number == 0:
            life.heals_in_vain = (0, 0)
            if thrown := life.thrown.get((self.state.history, step, slot)):
                text = f"{self.rank.name} computes slot {slot} of step {step} again, discarded {thrown}"
                world.judge.violate("thrown away", text)
        self._forward_and_backward(step, slot, summed=True)
        self.gradient[step, slot] += 1
        wrong = life.checks.is_wrong(self._computed, step, slot)
        errs = self.rank.number == slot % life.size  # errors in a slot are on one rank
        counts = (step, slot) not in self._given_nothing
        if wrong and errs and counts:
            self.gradient[step, WRONG] += 1
        self._bits = self._bits_of(step, slot, wrong)
        audited = slot in ledger.audited_slots(0, step, plan.slots, plan.audit_slots)
        if (wrong and errs and not audited) or (step, slot) in world.narrow:
            self.refuses.add(slot)
        not_finite = life.checks.is_not_finite(self._computed, step, slot)
        if errs and not_finite and counts:
            self.gradient[step, GARBAGE] += 1
            life.not_finite[self.state.history, step, slot] += check_all
            if life.not_finite[self.state.history, step, slot] > 2:
                world.judge.violate("not finite too often", f"{self.rank.name} computes {step, slot} once more")
        self.done.add(slot)
        self.computed.append(slot)
        if (self.state.history, step, slot) in self._given_up:
            self.recomputed.add(slot)

    def _forward_and_backward(self, step: int, slot: int, *, summed: bool) -> None:
        if self.reducer.takes != summed:
            self.judge.violate("audit", f"{self.rank.name} computes {step, slot}, to be summed: {self.reducer.takes}")
        self._world.judge_silence(self.rank, "computes a slot")
        slot_s, slow = self._world.plan.slot_s, self._world.slow.get(self.rank.life.group.id, 1.0)
        first = 1.0 if self._computed else FIRST
        self._world.scheduler.pause(0.9 * slot_s, 1.1 * slot_s * max(slow, first))
        self._together("sharded", step, slot)
        self._computed += 1
        self._world.costs["slot"] += 1

    def _bits_of(self, step: int, slot: int, wrong: bool) -> int:
        return 1 + (fold(step, slot, self.rank.life.group.id + 1 if wrong else 0) & (1 << 50) - 1)

    def bits(self, slot: int) -> int:
        self._same("bits")
        return self._bits

    def audit(self, step: int, slot: int) -> int:
        world, life = self._world, self.rank.life
        self._same("audit", step, slot)
        if (step, slot) >= world.plan.data_ends:
            raise OutOfData
        self._forward_and_backward(step, slot, summed=False)
        return self._bits_of(step, slot, life.checks.is_wrong(self._computed, step, slot))

    def refused(self) -> frozenset[int]:
        self._world.scheduler.check()
        return frozenset(self.refuses)

    def not_finite(self, step: int, slots: Collection[int]) -> None:
        self._same("not finite", step, tuple(slots))
        if self._world.mostly_fit(self.rank.life.able) and not {(step, slot) for slot in slots} <= self._world.infinite:
            text = f"{self.rank.name} gives up slots {list(slots)} of step {step}"
            self._world.judge.violate("not finite anywhere", text)
        self._given_nothing |= {(step, slot) for slot in slots}

    def results(self) -> SlotSums:
        self._together("results")
        return sums_of(self.state.step + 1, frozenset(self.done), self._world.plan.slots)

    def discard(self) -> None:
        self._same("discard")
        if self.rank.number == 0 and self.done:
            self._world.thrown_away(self)
        self._given_up.update(
            (self.state.history, step, slot) for step, slot in self.gradient if step > self.state.step
        )
        self.gradient.clear()
        self.done.clear()
        self.refuses.clear()

    def own_notes(self, step: int) -> bytes | None:
        self._world.scheduler.check()
        return f"{step}".encode() * 600 if step % NOTES_EVERY == 0 else None  # more than fits into one collective

    def receive_notes(self, notes: list[bytes]) -> None:
        self._world.scheduler.check()
        if len(set(notes)) > 1:
            self._world.judge.violate("notes of other steps", f"{self.rank.name} got {notes}")

    def await_snapshot(self) -> None:
        self._same("await_snapshot")

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self._words[:] = state.history
        self._words[:4] = state.step, state.history, state.way, state.flipped

    def serve(self) -> Any:
        self._world.scheduler.check()
        told = {"step": self.state.step, "history": self.state.history}
        return real.heal.HealState({"state": self._memory}, told, {"data": repr(told).encode()})

    def heal(self, healed: Any) -> None:
        state = State(*healed.tensors["state"][:4].tolist())
        self._same("heal", state.step, state.history)
        told = {"step": state.step, "history": state.history}
        same = bool((healed.tensors["state"][4:] == state.history).all())
        if not same or healed.meta != told or healed.blobs["data"] != repr(told).encode():
            text = f"{self.rank.name} is told step {healed.meta['step']} but reads {state}"
            self._world.judge.violate("state changed while it was read", text)
        if self.rank.number == 0:
            self._world.judge_healing(self.rank)
        self._take(state)

    def _take(self, state: State) -> None:
        world = self._world
        if self.has_state and state.step < self.state.step:
            world.judge.violate("step went back", f"{self.rank.name} had {self.state} and takes {state}")
        world.judge_heal(self.rank, state)
        world.judge.at(self.rank.name, self.rank.number, state)
        self.state, self.has_state = state, True

    def flip(self) -> None:
        """Change the parameters, but none of the counters."""
        self.state = replace(self.state, flipped=self.state.flipped + 1)

    def apply(self, commit: Commit) -> None:
        world, life = self._world, self.rank.life
        self._together("apply", commit.step)
        counted = [slot for slot in range(world.plan.slots) if commit.owners[slot] >= 0]
        tokens = [tokens_of(commit.step, slot) if slot in counted else 0.0 for slot in range(world.plan.slots)]
        if commit.tokens.tolist() != tokens or commit.extra.tolist() != [float(len(counted))]:
            text = f"step {commit.step} at {self.rank.name}: {commit.tokens.tolist()}, {commit.extra.tolist()}"
            world.judge.violate("wrong sums", text)
        at_work, spares = len(set(commit.owners) - {-1}), world.plan.spares
        if spares and commit.step not in world.retried and at_work > max(world.plan.groups, len(commit.able)) - spares:
            world.judge.violate("a spare computes", f"step {commit.step} at {self.rank.name}, able: {commit.able}")
        before = self.state
        after = world.judge.applied(self.rank.name, self.rank.number, before, commit, self._right(commit))
        world.scheduler.pause(0.001, 0.01)  # clip, optimizer
        self.state = after
        world.scheduler.pause(0.0005, 0.005)  # schedules, counters
        self.rank.snapshot(after)
        world.applied(self.rank, commit)
        if commit.able[0] == life.group.id and commit.step % world.plan.save_every == 0:
            self._save()
        if commit.unfit:
            world.leaves(self.rank, commit)

    def _right(self, commit: Commit) -> list[Contribution]:
        """Return the summed contributions, without the marks of errors if those do not count: if most groups are sick,
        all or more than ASKED err in one slot, or the only one with the state had no auditor, or let a slot pass."""
        world, fit = self._world, self._world.mostly_fit(commit.able)
        alone = len(commit.able) == 1 and world.plan.audit_slots > 0
        unseen = alone or any((number, commit.step) in world.passed for number in commit.able)
        lives = [life for number in commit.able if (life := world.groups[number].life) is not None]
        slots = [(commit.step, slot) for slot in range(world.plan.slots)]
        enough = min(ASKED + 1, len(lives))
        all_erred = any(sum(slot in life.checks.erred for life in lives) >= enough for slot in slots)
        counts = fit and not all_erred and not unseen
        if world.all_counts.setdefault(commit.history, counts):  # alike on all ranks, whenever each of them gets here
            return self.reducer.total
        return [
            replace(part, slots=tuple(entry for entry in part.slots if entry[0][1] >= 0)) for part in self.reducer.total
        ]

    def _save(self) -> None:
        world = self._world
        self._together("save", self.state.step)
        self.rank.life.saves = True
        world.scheduler.pause(0.05, world.plan.save_s)
        world.save(self.rank, self.state)
        self._together("written", self.state.step)
        if self.rank.number == 0:
            world.saved(self.rank.life, self.state.step)
        self._together("saved", self.state.step)
        self.rank.life.saves = False

    def checksum(self) -> int | None:
        every = self._world.plan.audit_every
        if not every or self.state.step % every:
            return None
        mine = fold(self.state.way, self.state.flipped)
        return fold(self.rank.life.work.meet(self.rank.number, ("checksum", self.state.step), mine))

    def restore(self, quorum) -> tuple[int, int]:
        world = self._world
        self._together("restore")
        world.judge_restore(self.rank)
        world.scheduler.pause(0.05, 1.0)
        state = world.restorable(self.rank)
        self._together("restored", state.step, state.history)
        self._take(state)
        return state.step, state.history

    def goes_on(self) -> bool:
        self._world.scheduler.check()
        return self.state.step < self._world.plan.steps

    def save_last(self) -> None:
        self._last_saves += 1
        if self.rank.life.spoiled(("not saved", self._last_saves), self._world.full):
            raise DiskFull("No space left on device")
        self._save()
