"""The slots of the step in progress that a group computes, holds for a retry, and refuses.

A group holds one sum of gradients, so it keeps or drops all of it. It refuses slots if a rank's checks found an error
in them, or if its losses or gradients are not finite. Either is a decision of the whole group and ends in `_refuse`:
the refusals are counted, and every slot that was held is computed again, as after a death. `ledger.plan` says which
group computes a refused slot.

Some slots are audited: a second group computes them too, and the bits are compared (`ledger.audited_slots`). If the
bits differ, the owner drops what it holds; the slot is computed again, and a third group audits it. Once two groups
have the same bits, a group with other bits is outvoted: it does not compute this slot again in this step.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.quorum.errors import GroupBroken
from everstep.step import ledger
from everstep.step.attempt import Attempt, Host
from everstep.step.decisions import Decisions
from everstep.step.interfaces import OutOfData, SlotSums, Work
from everstep.step.median_time import MedianTime
from everstep.step.reduction import GradientReducer

FINDINGS = "a check found wrong results and could not repair them"
OTHER_BITS = "groups computed different bits of one slot"
NOT_FINITE = "a loss, a gradient or its norm is not finite"


@dataclass(slots=True)
class Held:
    """The slots of the step in progress that a group's gradients contain, and those that it refused.

    Attributes:
        slots: slots whose gradients are in `param.grad`.
        lost: slots that were held in this step and dropped.
        computed: slots computed since the last event `attempt`, in order.
        recomputed: those of `computed` that were in `lost`.
        refused: slot → how often this group refused it.
        refused_here: slots that this rank itself refused, or in which its group was outvoted.
        not_finite: slot → how often its loss or its gradients alone were not finite.
        accepted: slots that this group holds although its checks refuse them (`ledger.Plan.accepted`).
        asked: refused slot → the group that was last asked to compute it, unless that group had to accept it.
        bits: audited slot → the bits that this group computed.
        told: audited slot → pairs (group, its bits) that were compared, in order.
    """

    slots: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    computed: list[int] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)
    refused: Counter[int] = field(default_factory=Counter)
    refused_here: set[int] = field(default_factory=set)
    not_finite: Counter[int] = field(default_factory=Counter)
    accepted: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=dict)
    bits: dict[int, int] = field(default_factory=dict)
    told: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))


class Judged(NamedTuple):
    """One rank's judgement of its sums: whether it has them, whether they are finite, whether this group's own part is
    finite, and whether the trainer holds the slots that the ledger says. `found`: slots that its checks refuse."""

    summed: bool
    finite: bool
    own_finite: bool
    holds_same: bool
    found: list[int]


class Holding:
    """Computes, holds, judges and refuses slots, as one rank of the group with id `group`."""

    def __init__(self, work: Work, reducer: GradientReducer, decisions: Decisions, host: Host, group: int) -> None:
        self._work, self._reducer, self._decisions, self._group = work, reducer, decisions, group
        self._clock, self._files, self._events = host.clock, host.files, host.events
        self.held = Held()
        self.slot_time = MedianTime()

    def start(self) -> None:
        """Begin another step, of which nothing is held."""
        self.held = Held()
        self._forget()

    def drop(self) -> None:
        """Drop all slots that are held. What was refused in this step is remembered."""
        self.held.lost |= self.held.slots
        self.held.slots.clear()
        self.held.accepted.clear()
        self._forget()

    def _forget(self) -> None:
        self._work.discard()
        self._reducer.forget()

    def note_plan(self, plan: ledger.Plan, step: int) -> None:
        """Remember which group is asked for each refused slot. Tell the trainer which slots no group can compute."""
        for group, share in plan.shares.items():
            self.held.asked |= dict.fromkeys(plan.doubted.intersection(share), group)
        for slot in plan.accepted:
            self.held.asked.pop(slot, None)
        if plan.not_finite:
            self._work.not_finite(step, sorted(plan.not_finite))
            self.held.refused_here -= plan.not_finite  # that says nothing about this rank

    def compute(self, attempt: Attempt, share: Sequence[int]) -> None:
        """Audit the slots that the plan says, then compute and hold `share`. Sums start during its last slot."""
        held, step = self.held, attempt.step
        self._audit(attempt)
        if attempt.exhausted:
            return
        begun = self._clock.now()
        for done, slot in enumerate(share, 1):
            doubted = slot in attempt.plan.doubted
            self._files.beat("compute", step)
            self._reducer.begin_slot(last=done == len(share))
            try:
                self._work.compute(step, slot, check_all=doubted)
            except OutOfData:
                attempt.exhausted = True
                break
            self._reducer.end_slot()
            if slot in attempt.plan.audited:
                held.bits[slot] = self._work.bits(slot)
            held.slots.add(slot)
            held.computed.append(slot)
            held.recomputed |= held.lost & {slot}
            if doubted:
                self._judge_slot(attempt, slot)
        if share and not attempt.exhausted and not attempt.plan.doubted:  # with every check a slot takes longer
            self.slot_time.take(self._clock.now() - begun, len(share))

    def _audit(self, attempt: Attempt) -> None:
        """Compute the slots that this group audits and has no bits of, or is asked for again."""
        for slot, auditor in attempt.plan.auditors.items():
            if auditor == self._group and (slot in attempt.plan.doubted or slot not in self.held.bits):
                self._files.beat("compute", attempt.step)
                self._reducer.begin_audit()
                try:
                    self.held.bits[slot] = self._work.audit(attempt.step, slot)
                except OutOfData:
                    attempt.exhausted = True
                    return

    def bits(self, plan: ledger.Plan) -> list[int]:
        """Return, for a tally, two numbers per audited slot: the bits that this group has as the slot's owner, and
        those it has as its auditor; 0 if it is not the owner, or not the auditor."""
        held, said = self.held, []
        for slot in plan.audited:
            for has in (slot in held.slots, plan.auditors.get(slot) == self._group):
                said.append(held.bits.get(slot, 0) if has else 0)
        return said

    def compare_bits(self, attempt: Attempt, tally: ledger.Tally) -> None:
        """Act on bits that all ranks of the group have seen: drop what is held if they differ; once two groups have the
        same bits, emit which groups had other bits."""
        held, differing = self.held, ledger.differing_bits(tally, attempt.plan)
        for slot, *bits in zip(attempt.plan.audited, tally.bits[::2], tally.bits[1::2], strict=True):
            if not all(bits):
                continue
            pair = attempt.plan.owners[slot], attempt.plan.auditors[slot]
            held.told[slot] += zip(pair, bits, strict=True)
            if slot in differing:
                self._differs(attempt, slot, pair)
            elif self._group != pair[0]:
                continue
            elif bits[0] != bits[1]:
                reason = f"{OTHER_BITS}, and there is no other group to ask"
                self._events.emit("slot_accepted", attempt.step, slot=slot, reason=reason)
            elif wrong := sorted({group for group, known in held.told[slot] if known != bits[0]}):
                self._events.emit("slot_wrong", attempt.step, slot=slot, groups=wrong, reason=OTHER_BITS)

    def _differs(self, attempt: Attempt, slot: int, pair: tuple[int, int]) -> None:
        """Refuse a slot whose owner and auditor (`pair`) have different bits. Both refuse it, unless two or more groups
        have the same bits and no others are as common: then only the groups with other bits dispute it."""
        held, said = self.held, dict(self.held.told[slot])
        (common, times), (_, fewer) = Counter(said.values()).most_common(2)
        if times > fewer:
            held.refused.pop(slot, None)
            if self._group in said and said[self._group] != common:
                held.refused_here.add(slot)
                held.refused[slot] = ledger.ASK_AFTER
        elif self._group in pair:
            held.refused[slot] += 1
        if self._group in pair:
            self._events.emit("slot_differs", attempt.step, slot=slot, groups=list(pair), reason=OTHER_BITS)
        if slot in held.slots:
            self.drop()

    def _judge_slot(self, attempt: Attempt, slot: int) -> None:
        """Hold or refuse a slot that some group had refused and this group has just computed. A decision of the group.
        What the group held before is finite, so only this slot can make its losses or gradients not finite."""
        held, losses = self.held, self._work.results().loss
        finite = bool(losses.isfinite().all()) and self._reducer.own_finite()
        passed = slot not in self._work.refused()
        if not finite or not passed:
            held.refused_here.add(slot)
        said = self._decisions.gather("slot", [finite, passed])
        finite, passed = (all(flags) for flags in zip(*said, strict=True))
        if not finite:
            held.not_finite[slot] += 1
            self._refuse(attempt, [slot], NOT_FINITE)
        elif not passed and slot in attempt.plan.accepted:
            held.refused[slot] += 1
            held.accepted.add(slot)
            self._events.emit("slot_accepted", attempt.step, slot=slot, reason="other groups refused it too")
        elif not passed:
            self._refuse(attempt, [slot], FINDINGS)

    def judge_sums(self, attempt: Attempt, results: SlotSums, error: str) -> tuple[bool, str]:
        """Judge what is held, and its sums. Refuse and drop it if a rank's checks found an error in it, or if this
        group's own part, or its loss, is not finite. A decision of the group.

        Args:
            results: of the slots that the trainer says it holds.
            error: why this rank has no sums; empty if it has them.

        Returns:
            whether all ranks have their sums; and why these must not be committed, empty if they are finite. All groups
            have the same sums, so all find the same. That a group refused its part is in the tally.

        Raises:
            GroupBroken: a rank's trainer holds other slots than the ledger says.
        """
        held = self.held
        finite = error == "" and self._reducer.finite()
        own_finite = bool(results.loss.isfinite().all()) and (finite or self._reducer.own_finite())
        found = self._work.refused() - held.accepted
        held.refused_here |= found  # if the gradients are not finite, each slot is judged alone in the next attempt
        mine = Judged(error == "", finite, own_finite, results.slots == held.slots, sorted(found))
        ranks = [Judged(*said) for said in self._decisions.gather("sums", mine)]
        refused = {slot for rank in ranks for slot in rank.found}
        if other := [number for number, rank in enumerate(ranks) if not rank.holds_same]:
            here = f"it says {sorted(held.slots)}, and this rank's trainer holds {sorted(results.slots)}"
            raise GroupBroken(f"the trainers of ranks {other} hold other slots than the ledger says: {here}")
        if not all(rank.own_finite for rank in ranks):
            self._refuse(attempt, held.slots, NOT_FINITE)
        elif refused:
            self._refuse(attempt, refused, FINDINGS)
        summed, finite = all(rank.summed for rank in ranks), all(rank.finite for rank in ranks)
        return summed, "" if finite else "the sum of the gradients is not finite"

    def _refuse(self, attempt: Attempt, slots: Iterable[int], reason: str) -> None:
        for slot in sorted(slots):
            self._events.emit("slot_refused", attempt.step, slot=slot, reason=reason)
            self.held.refused[slot] += 1
        attempt.refused = True
        self.drop()
