"""What a group computes of the step in progress, holds for a retry, and refuses.

A group holds one sum of gradients: it keeps all of it or drops all of it. What is wrong with it is known in three ways:
this rank's checks found it, the gradients are not finite, or the sums over the groups are not. Each is a decision of
the whole group, and ends in `_refuse`: the refused slots are counted, and everything that is held is computed again, as
after a death. Who computes what was refused is in `ledger.plan`.

Some slots are audited: another group computes them too, and the bits are compared (`ledger.audited_slots`). Where they
differ, the owner drops what it holds, and the slot is computed again and audited by a third group. Whose bits two
others do not have is outvoted: it computes this slot no more.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.quorum.errors import GroupBroken
from everstep.step import ledger
from everstep.step.attempt import Attempt, Host
from everstep.step.decisions import Decisions
from everstep.step.interfaces import OutOfData, Work
from everstep.step.pace import Pace
from everstep.step.reduction import GradientReducer

FINDINGS = "attention findings that were not repaired"
OTHER_BITS = "two groups computed other bits of one slot"
NOT_FINITE = "a gradient is not finite, or its norm is not"


@dataclass(slots=True)
class Held:
    """What a group's gradients contain of the step in progress, and what it refused of that step.

    Attributes:
        slots: what they contain.
        lost: slots that they contained and that were given up.
        computed: slots computed since the last event `attempt`, in order.
        recomputed: those of them that were in `lost`.
        refused: how often this group refused a slot.
        refused_here: slots that this rank refused, or that were not finite on it.
        not_finite: how often a slot was not finite when it was judged alone.
        accepted: refused slots that are held all the same.
        asked: the group that was asked for a refused slot last, unless it was to accept it.
        bits: of audited slots that this group computed.
        told: of audited slots, all groups and their bits that were compared, in order.
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
    """What one rank says of its sums: that it has them, that they are finite, that this group's part of them is, and
    that the trainer holds what the ledger says; and which slots its checks refuse."""

    summed: bool
    finite: bool
    own_finite: bool
    whole: bool
    found: list[int]


class Holding:
    """One rank's part in what its group holds.

    Args:
        work, reducer: the trainer's side.
        decisions: of the group.
        host: of this rank.
        group: this group's id.
    """

    def __init__(self, work: Work, reducer: GradientReducer, decisions: Decisions, host: Host, group: int) -> None:
        self._work, self._reducer, self._decisions, self._group = work, reducer, decisions, group
        self._clock, self._files, self._events = host.clock, host.files, host.events
        self.held = Held()
        self.pace = Pace()

    def start(self) -> None:
        """Another step comes: nothing of it is held."""
        self.held = Held()
        self._forget()

    def drop(self) -> None:
        """Give up what is held; what was refused of the step is remembered."""
        self.held.lost |= self.held.slots
        self.held.slots.clear()
        self.held.accepted.clear()
        self._forget()

    def _forget(self) -> None:
        self._work.discard()
        self._reducer.forget()

    def heed(self, plan: ledger.Plan, step: int) -> None:
        """Remember who is asked for refused slots, and say which of them nobody can compute."""
        for group, share in plan.shares.items():
            self.held.asked |= dict.fromkeys(plan.doubted.intersection(share), group)
        for slot in plan.accepted:
            del self.held.asked[slot]
        if plan.not_finite:
            self._work.not_finite(step, sorted(plan.not_finite))

    def compute(self, attempt: Attempt, share: Sequence[int]) -> None:
        """Compute and hold slots. Sums start in the last one."""
        held, step = self.held, attempt.step
        if not self._audit(attempt):
            return
        begun = self._clock.now()
        for done, slot in enumerate(share, 1):
            doubted = slot in attempt.plan.doubted
            self._files.beat("compute", step)
            self._reducer.begin_slot(last=done == len(share))
            try:
                self._work.compute(step, slot, whole=doubted)
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
            self.pace.take(self._clock.now() - begun, len(share))

    def _audit(self, attempt: Attempt) -> bool:
        """Compute the slots that this group audits, unless it has; whether there was data for them."""
        for slot, auditor in attempt.plan.auditors.items():
            again = slot in attempt.plan.doubted
            if auditor == self._group and (again or slot not in self.held.bits):
                self._files.beat("compute", attempt.step)
                self._reducer.begin_audit()
                try:
                    self.held.bits[slot] = self._work.audit(attempt.step, slot)
                except OutOfData:
                    attempt.exhausted = True
                    return False
        return True

    def bits(self, plan: ledger.Plan) -> list[int]:
        """For a tally: of each audited slot what this group has as its owner, and what as its auditor."""
        held, said = self.held, []
        for slot in plan.audited:
            for has in (slot in held.slots, plan.auditors.get(slot) == self._group):
                said.append(held.bits.get(slot, 0) if has else 0)
        return said

    def heed_bits(self, attempt: Attempt, tally: ledger.Tally) -> None:
        """Draw conclusions from bits that all ranks of the group have seen: drop what differs, and once two groups have
        the same, name the others."""
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
                reason = f"{OTHER_BITS}, and nobody is left to ask"
                self._events.emit("slot_accepted", attempt.step, slot=slot, reason=reason)
            elif wrong := sorted({group for group, known in held.told[slot] if known != bits[0]}):
                self._events.emit("slot_wrong", attempt.step, slot=slot, groups=wrong, reason=OTHER_BITS)

    def _differs(self, attempt: Attempt, slot: int, pair: tuple[int, int]) -> None:
        """Owner and auditor have other bits: both refuse the slot, until more groups have the same than any others."""
        held, said = self.held, dict(self.held.told[slot])
        (common, times), *others = Counter(said.values()).most_common(2)
        if times > 1 and all(times > fewer for _, fewer in others):
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
        """What becomes of a slot that some group has refused, now that this one has computed it. A decision of the
        group; what it held before is finite."""
        held = self.held
        finite, passed = self._reducer.own_finite(), slot not in self._work.refused()
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
            self._events.emit("slot_accepted", attempt.step, slot=slot, reason="other groups refused it as well")
        elif not passed:
            self._refuse(attempt, [slot], FINDINGS)

    def judge_sums(self, attempt: Attempt, computed: frozenset[int], error: str) -> tuple[bool, str]:
        """Look at what is held and at its sums. It is refused and dropped if some rank's checks say so or this group's
        own part is not finite. A decision of the group.

        Args:
            computed: what the trainer says that it holds.
            error: why this rank has no sums; empty if it has.

        Returns:
            whether all ranks have their sums, and why they are not to be committed, which all groups know then; empty
            if they are, or if some group refuses its part.

        Raises:
            GroupBroken: what a rank holds is not what the ledger says.
        """
        held = self.held
        finite = error == "" and self._reducer.finite()
        own_finite = finite or self._reducer.own_finite()
        found = self._work.refused() - held.accepted
        held.refused_here |= found if own_finite else held.slots
        mine = Judged(error == "", finite, own_finite, computed == held.slots, sorted(found))
        ranks = [Judged(*said) for said in self._decisions.gather("sums", mine)]
        refused = {slot for rank in ranks for slot in rank.found}
        if not all(rank.whole for rank in ranks):
            raise GroupBroken(f"the ledger says slots {sorted(held.slots)} and the trainer {sorted(computed)}")
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
