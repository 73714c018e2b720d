"""Which group computes and holds which slots of a step. Pure functions of what the groups exchange.

A step is S slots. At the beginning of every attempt each group of the quorum sends the others a `Row`: the state it
has, whether it computes, and the slots whose gradients it still holds from an earlier attempt at the same step. From
the same rows every group makes the same `Plan`. At the end of the attempt the groups sum their `Tally`s, which count
how many groups added each slot to the sum; `verdict` decides whether that sum is the step.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic_core import to_json

from everstep.quorum.request import Quorum
from everstep.run import typed
from everstep.step.interfaces import SlotSums

FLAGS = 4  # of a tally: leaving, exhausted, refused, wanting

ASK_AFTER = 2
"""Refusals of a slot by one group in one step, after which another group is asked to compute it."""

ENOUGH = 3
"""Groups that must refuse a slot before its data or the check's bound is blamed. Two faulty groups are not enough."""

SLOWER = 1.4
"""A group is slow if a slot takes it this many times as long as the fastest group. A smaller difference is noise."""

OnLoss = Literal["redistribute", "shrink"]


def next_history(history: int, step: int, key: str) -> int:
    """Return the history after a commit of `step` in the quorum with this key, 62 bits: a hash chain over all commits
    behind a state. Two groups have the same history only if they committed the same steps in the same quorums."""
    text = f"{history}/{step}/{key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, slots=True)
class Row:
    """What one group tells the others at the beginning of an attempt.

    Attributes:
        group: its group id.
        quorum: key of the quorum that it is in.
        step, history: the state that it computes on; without meaning if it does not compute.
        computes: whether it can compute slots now. False for a group that heals.
        checksum: checksum of its parameters after `step`, 62 bits; None if no audit is due.
        proven: whether an audit has confirmed its parameters since it last took over a state.
        slot_us: microseconds that it lately took per slot; 0 if it does not know yet.
        held: slots of step + 1 whose gradients it holds.
        refused: slots of step + 1 that it refused.
        disputed: those of `refused` that it refused at least ASK_AFTER times.
        not_finite: those of `refused` whose gradients, judged alone, were not finite.
    """

    group: int
    quorum: str
    step: int
    history: int
    computes: bool
    checksum: int | None = None
    proven: bool = False
    slot_us: int = 0
    held: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    disputed: frozenset[int] = frozenset()
    not_finite: frozenset[int] = frozenset()

    def encode(self) -> bytes:
        """As JSON text."""
        return to_json(self)

    @staticmethod
    def decode(said: bytes) -> "Row":
        """The inverse of `encode`. Raises UnfitError."""
        return typed.parse(Row, typed.loads(said), "a row")


def why_not_sum(rows: Sequence[Row], quorum: Quorum) -> str:
    """Return why the groups with these rows must not sum in this quorum; empty if they may.

    This excludes groups of another quorum, at another step or of another history before any sum.
    """
    if tuple(row.group for row in rows) != quorum.groups or any(row.quorum != quorum.key for row in rows):
        return "a group's row is from another quorum"
    computing = [row for row in rows if row.computes]
    if not computing:
        return "no group computes"
    for row in computing:
        if (row.step, row.history) != (quorum.state.step, quorum.state.history):
            return f"group {row.group}, at step {row.step}, has another state than its quorum"
    return ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which group does what in an attempt; the same on every group.

    Attributes:
        shares: group id → slots that it computes, in order, those of `doubted` first. Every group that computes has an
            entry, which may be empty.
        drops: groups that drop what they hold, since another group holds one of their slots as well.
        owners: slot → the group that holds it, or computes it in this attempt.
        doubted: refused slots that are computed in this attempt. They run with every check and are judged one by one.
        accepted: slots that ENOUGH groups, or all, refused. What checks find in them, and other bits, are ignored.
        not_finite: slots in both, whose gradients were not finite on ENOUGH + 1 groups, or on all that compute.
        audited: slots whose bits two groups compare.
        auditors: audited slot → the group that computes it besides its owner, without adding it to anything. Has no
            entry for a slot if no other group can.
        paces: group that computes → its time per slot, as a multiple of the fastest group's (`paces`).
    """

    shares: dict[int, tuple[int, ...]]
    drops: frozenset[int]
    owners: Mapping[int, int]
    doubted: frozenset[int] = frozenset()
    accepted: frozenset[int] = frozenset()
    not_finite: frozenset[int] = frozenset()
    audited: tuple[int, ...] = ()
    auditors: Mapping[int, int] = field(default_factory=dict)
    paces: Mapping[int, float] = field(default_factory=dict)

    @property
    def loads(self) -> dict[int, float]:
        """Group id → how long it computes its share and its audits, in slots of the fastest group."""
        audits = Counter(self.auditors.values())
        return {group: self.paces[group] * (len(share) + audits[group]) for group, share in self.shares.items()}


NO_PLAN = Plan({}, frozenset(), {})


@dataclass(frozen=True, slots=True)
class Dealing:
    """Settings of how slots are dealt to groups; the same on all groups.

    Attributes:
        on_loss: with `shrink`, lost slots are not computed again while some group still holds a slot of the step. A
            refused slot is not a lost one.
        homes: if not 0, slot s is dealt to group s mod `homes` if that group computes; with groups of higher ids, mod
            their number. So a slot moves only when groups are lost, added or come back.
        groups, spares: of `groups` groups, or of all that compute if they are more, `spares` stand by: they get no
            slots while all others are there.
    """

    on_loss: OnLoss = "redistribute"
    homes: int = 0
    groups: int = 0
    spares: int = 0

    def working(self, able: Sequence[Row], pace: Mapping[int, float]) -> list[Row]:
        """Return the rows of the groups in `able` that get slots. Slow groups stand by first, then those just back."""
        most = max(self.groups, len(able)) - self.spares
        return sorted(able, key=lambda row: (pace[row.group] > 1.0, row.slot_us == 0, row.group))[:most]


EVENLY = Dealing()


def plan(rows: Sequence[Row], slots: int, dealing: Dealing = EVENLY, audited: tuple[int, ...] = ()) -> Plan:
    """Split the slots that no group holds among the groups that compute, so that all of them are done as early as
    possible.

    Args:
        rows: one per group in the quorum, in any order.
        slots: S.
        dealing: how the run deals slots.
        audited: slots that two groups compute, ascending.

    Returns:
        the plan. Under `redistribute`, its `shares` and what is held after its `drops` cover each slot exactly once.
    """
    able = sorted((row for row in rows if row.computes), key=lambda row: row.group)
    drops = _conflicting(able)
    holders = {slot: row.group for row in able if row.group not in drops for slot in row.held}
    missing = [slot for slot in range(slots) if slot not in holders]
    refused = frozenset(slot for row in able for slot in row.refused)
    doubted = refused.intersection(missing)
    certain = [slot for slot in missing if slot not in doubted]
    if dealing.on_loss == "shrink" and holders:
        certain = []
    pace = paces(able)
    at: dict[int, list[int]] = {row.group: [] for row in dealing.working(able, pace)}
    if homes := dealing.homes and max(dealing.homes, max(at, default=0) + 1):
        for slot in certain:
            if slot % homes in at:
                at[slot % homes].append(slot)
        certain = [slot for slot in certain if slot % homes not in at]
    shares = {row.group: () for row in able} | _deal(certain, at, pace, each=not holders)
    doubts: dict[int, list[int]] = {group: [] for group in shares}
    for slot in sorted(doubted):
        asked = _who_is_asked(slot, able, {group: len(share) + len(doubts[group]) for group, share in shares.items()})
        doubts[asked].append(slot)
    accepted = frozenset(slot for slot in refused if _passes(slot, able))
    most = min(ENOUGH + 1, len(able))
    not_finite = frozenset(slot for slot in accepted & doubted if sum(slot in row.not_finite for row in able) >= most)
    shares = {group: (*doubts[group], *share) for group, share in shares.items()}
    owners = holders | {slot: group for group, share in shares.items() for slot in share}
    auditors = _auditors(audited, owners, able)
    return Plan(shares, drops, owners, doubted, accepted, not_finite, audited, auditors, pace)


def audited_slots(seed: int, step: int, slots: int, share: float) -> tuple[int, ...]:
    """Return the slots of a step that are audited: each with probability `share`, drawn from the seed."""

    def drawn(slot: int) -> float:
        text = f"audit/{seed}/{step}/{slot}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64

    return tuple(slot for slot in range(slots) if share and drawn(slot) < share)


def _auditors(audited: Sequence[int], owners: Mapping[int, int], able: Sequence[Row]) -> dict[int, int]:
    """Choose the auditor of each audited slot: preferably a group that has not refused it, then the one with the fewest
    audits. A slot has no auditor if all other groups dispute it and its owner has not refused it."""
    found: dict[int, int] = {}
    for slot in audited:
        owner = owners.get(slot)
        doubts = any(slot in row.refused for row in able if row.group == owner)
        others = [row for row in able if row.group != owner and (doubts or slot not in row.disputed)]
        if slot in owners and others:
            load = Counter(found.values())
            found[slot] = min(others, key=lambda row: (slot in row.refused, load[row.group], row.group)).group
    return found


def _passes(slot: int, able: Sequence[Row]) -> bool:
    """Whether a refused slot is to be held in spite of what checks find in it: other groups were asked for it, and
    ENOUGH groups, or all that there are, refused it."""
    refused = sum(slot in row.refused for row in able)
    return refused >= min(ENOUGH, len(able)) and any(slot in row.disputed for row in able)


def _who_is_asked(slot: int, able: Sequence[Row], load: Mapping[int, int]) -> int:
    """Choose the group that computes a refused slot. At first that is the group that refused it, since a transient
    error does not come twice. Once it disputes the slot, choose one that has not refused it. If the slot is to pass,
    choose one on which it was finite, preferably one that does not dispute it. Of several, choose the one that refused
    the fewest slots, then the one with the smallest share."""
    same_group_again, passes = not any(slot in row.disputed for row in able), _passes(slot, able)

    def preference(row: Row) -> tuple[bool, bool, int, int, int]:
        disfavoured = slot in row.not_finite if passes else (slot in row.refused) != same_group_again
        return disfavoured, slot in row.disputed, len(row.refused), load[row.group], row.group

    return min(able, key=preference).group


def at_fault(group: int, rows: Sequence[Row], asked: Mapping[int, int], owners: Sequence[int]) -> frozenset[int]:
    """Return the slots that show that `group` computes wrongly: it disputes them, and the commit has them from another
    group, which was asked for them and did not refuse them.

    Args:
        rows: rows of the attempt that committed.
        asked: refused slot → the group that was last asked for it, as far as `group` knows; without slots to accept.
        owners: by slot, the group that computed it; -1 for none.
    """
    by_group = {row.group: row for row in rows if row.computes}
    passed = {slot for slot, other in asked.items() if owners[slot] == other and slot not in by_group[other].refused}
    return by_group[group].disputed & passed if group in by_group else frozenset()


def paces(rows: Sequence[Row]) -> dict[int, float]:
    """Return each group's time per slot as a multiple of the fastest group's, rounded to quarters; 1.0 if it is less
    than `SLOWER`, or the group does not know its time yet."""
    fastest = min((row.slot_us for row in rows if row.slot_us), default=1)
    ratios = {row.group: row.slot_us / fastest for row in rows}
    return {group: round(4 * ratio) / 4 if ratio >= SLOWER else 1.0 for group, ratio in ratios.items()}


def _deal(
    slots: Sequence[int], at: Mapping[int, Sequence[int]], pace: Mapping[int, float], *, each: bool
) -> dict[int, tuple[int, ...]]:
    """Deal each slot to the group that would be done with it first; ties go to the lower group id. Return the slots of
    each group, ascending, with those that it had before.

    Args:
        at: group id → slots that it has already. No other group gets slots.
        pace: group id → its time per slot.
        each: whether to begin with one slot for each group that has none: only a group that computes learns that it has
            become faster.
    """
    shares = {group: list(own) for group, own in at.items()}
    idle = [group for group in sorted(shares) if each and not shares[group]]
    for group, slot in zip(idle, slots, strict=False):
        shares[group].append(slot)
    done = [((len(own) + 1) * pace[group], group) for group, own in shares.items()]
    heapq.heapify(done)
    for slot in slots[len(idle) :] if shares else ():
        when, group = done[0]
        heapq.heapreplace(done, (when + pace[group], group))
        shares[group].append(slot)
    return {group: tuple(sorted(share)) for group, share in shares.items()}


def _conflicting(rows: Sequence[Row]) -> frozenset[int]:
    """Return the groups that must drop what they hold, so that no slot is held twice. A group holds one sum, so it
    drops all of it or nothing.

    A group that was wrongly taken for dead comes back with slots that others computed again meanwhile. Groups that hold
    more slots keep theirs; ties go to the lower group id.
    """
    taken: set[int] = set()
    drops = set()
    for row in sorted(rows, key=lambda row: (-len(row.held), row.group)):
        if row.held & taken:
            drops.add(row.group)
        else:
            taken |= row.held
    return frozenset(drops)


def differing_groups(rows: Sequence[Row]) -> frozenset[int]:
    """Return the groups whose checksum differs from the one that most groups have.

    A group that took over its state since an audit last confirmed it has what its source had. It has a vote only if
    there are no other groups, or to decide between checksums that are equally common. If that leaves a tie, the
    checksum of the lowest group id wins: some state has to go on, and every group must pick the same.
    """
    audited = sorted((row for row in rows if row.checksum is not None and row.computes), key=lambda row: row.group)
    if not audited:
        return frozenset()
    voters = [row for row in audited if row.proven] or audited
    counts, all_counts = (Counter(row.checksum for row in some) for some in (voters, audited))
    kept = max(voters, key=lambda row: (counts[row.checksum], all_counts[row.checksum], -row.group)).checksum
    return frozenset(row.group for row in audited if row.checksum != kept)


@dataclass(frozen=True, slots=True)
class Tally:
    """What is summed beside the gradients: the part of one group, or the sum over all groups.

    Attributes:
        coverage: by slot, the number of groups that added it to the sum.
        sums: tokens, losses and further sums of the slots.
        leaving: number of groups that stop after this step.
        exhausted: number of groups that found no more data.
        refused: number of groups that refused a slot which is in the sum of the gradients.
        wanting: number of ranks that want a new quorum before the next step. Differs between rank columns.
        bits: for each audited slot, the bits that its owner computed and those that its auditor computed; 0 for none.
    """

    coverage: tuple[int, ...]
    sums: SlotSums
    leaving: int
    exhausted: int
    refused: int
    wanting: int = 0
    bits: tuple[int, ...] = ()

    def encode(self) -> torch.Tensor:
        """Return the tally as a float64 vector. The sum of such vectors is the vector of the summed tally."""
        flags = [self.leaving, self.exhausted, self.refused, self.wanting, *self.bits]
        counts = torch.tensor([*self.coverage, *flags], dtype=torch.float64)
        return torch.cat([counts, self.sums.tokens, self.sums.loss, self.sums.extra])

    @staticmethod
    def decode(vector: torch.Tensor, slots: int, audited: int = 0) -> "Tally":
        """Read what `encode` returned, with S = `slots`, `audited` of which are audited."""
        size = slots + FLAGS + 2 * audited
        counts, tokens, loss, extra = vector.split([size, slots, slots, len(vector) - size - 2 * slots])
        whole = [round(count) for count in counts.tolist()]
        leaving, exhausted, refused, wanting, *bits = whole[slots:]
        sums = SlotSums(tokens, loss, extra, frozenset())
        return Tally(tuple(whole[:slots]), sums, leaving, exhausted, refused, wanting, tuple(bits))

    def digest(self) -> int:
        """Return a 62-bit hash of what decides about the step: equal on all ranks of a group that saw the same sums."""
        whole = (self.coverage, self.leaving, self.exhausted, self.refused, self.bits, self.sums.tokens.tolist())
        return int.from_bytes(hashlib.blake2b(repr(whole).encode(), digest_size=8).digest(), "little") >> 2


def differing_bits(tally: Tally, plan: Plan) -> frozenset[int]:
    """Return the audited slots of which owner and auditor have different bits, without those that pass
    (`Plan.accepted`), as no group is left to ask."""
    pairs = zip(plan.audited, tally.bits[::2], tally.bits[1::2], strict=True)
    return frozenset(slot for slot, own, other in pairs if own and other and own != other) - plan.accepted


def verdict(tally: Tally, on_loss: OnLoss = "redistribute") -> str:
    """Return why a sum with this tally is not the step; empty if it is."""
    coverage = tally.coverage
    if tally.refused:
        return "a slot in the sum was refused"
    if twice := [slot for slot, count in enumerate(coverage) if count > 1]:
        return f"slots {twice} are in the sum more than once"
    missing = [slot for slot, count in enumerate(coverage) if count < 1]
    if missing and (on_loss == "redistribute" or len(missing) == len(coverage)):
        return f"slots {missing} are missing from the sum"
    return ""
