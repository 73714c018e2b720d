"""Who holds which slots of a step: pure decisions, no processes.

A step is S slots. Every attempt begins with one exchange, in which each group of the quorum tells the others a `Row`:
the state it has, whether it computes, and the slots whose gradients it still holds from an earlier attempt at the
same step. From the same rows every group makes the same `Plan`. The attempt ends with a sum of `Tally`s, in which the
number of groups that put each slot into the sum is counted; `verdict` says whether that sum is the step.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch

from everstep.quorum.request import Quorum
from everstep.run import typed
from everstep.step.interfaces import SlotSums

FLAGS = 4  # of a tally

ASK_AFTER = 2
"""Refusals of a slot by one group in one step after which another group computes it."""

ENOUGH = 3
"""Groups that refuse a slot after which it is the data or the bound: two that are sick cannot be so many."""

SLOWER = 1.4
"""A group is slow if a slot takes it so many times as long as the fastest. Slots differ by less anyway."""

OnLoss = Literal["redistribute", "shrink"]


def extend(history: int, step: int, key: str) -> int:
    """The history after a commit of `step` in the quorum with this key, 62 bits: a hash chain over the commits behind
    a state. Two groups have the same history only if they committed the same steps in the same quorums."""
    text = f"{history}/{step}/{key}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, slots=True)
class Row:
    """What one group says at the beginning of an attempt.

    Attributes:
        group: its group id.
        quorum: key of the quorum that it is in.
        step, history: of the state it computes on; of no meaning in a group that does not compute.
        computes: whether it can compute slots now. False for a group that heals.
        checksum: of its parameters after `step`, 62 bits, or None when no audit is due.
        proven: whether an audit has agreed with it since it last took over a state.
        slot_us: microseconds that a slot has taken it lately; 0 while it does not know.
        held: slots of step + 1 whose gradients it holds.
        refused: slots of step + 1 that it refused.
        disputed: those of them that it refused ASK_AFTER times.
        not_finite: those of them whose gradients were not finite when it computed them alone.
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
        values = {field.name: getattr(self, field.name) for field in fields(Row)}
        return typed.dumps({name: sorted(v) if isinstance(v, frozenset) else v for name, v in values.items()})

    @staticmethod
    def decode(said: bytes) -> "Row":
        """The inverse of `encode`. Raises UnfitError."""
        return typed.parse(Row, typed.loads(said), "a row")


def objection(rows: Sequence[Row], quorum: Quorum) -> str:
    """Why these rows must not be summed over in this quorum; empty if they may.

    Groups of another quorum, at another step or of another history are told apart here, before any sum.
    """
    if tuple(row.group for row in rows) != quorum.groups or any(row.quorum != quorum.key for row in rows):
        return "some group is in another quorum"
    computing = [row for row in rows if row.computes]
    if not computing:
        return "no group computes"
    for row in computing:
        if (row.step, row.history) != (quorum.state.step, quorum.state.history):
            return f"group {row.group} is at step {row.step} of another history"
    return ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an attempt does, the same on every group.

    Attributes:
        shares: group id → slots it computes, in order, those of `doubted` first; every group that computes has an
            entry, perhaps an empty one.
        drops: groups that let go of what they hold, since another group holds one of their slots as well.
        owners: by slot the group that holds or computes it then.
        doubted: slots computed in this attempt that some group refused: with every check, and judged one by one.
        accepted: those of them that enough groups refused: it is the data or the bound, and they pass.
        not_finite: those of them whose gradients are not finite on any group that was asked.
        audited: slots whose bits are compared.
        auditors: by such a slot the group that computes it too, and adds it to nothing; none where there is no other.
        paces: by each group that computes, how many times as long as the fastest a slot takes it (`paces`).
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
        """How long each group computes, its share and what it audits, in slots of the fastest group."""
        audits = Counter(self.auditors.values())
        return {group: self.paces[group] * (len(share) + audits[group]) for group, share in self.shares.items()}


NO_PLAN = Plan({}, frozenset(), {})


@dataclass(frozen=True, slots=True)
class Dealing:
    """To whom slots are dealt; the same on all groups.

    Attributes:
        on_loss: `shrink` computes nothing for lost slots as long as some group still holds one; a slot that was refused
            is not lost.
        homes: if not 0, slot s is dealt to group s mod `homes` where that computes, so that it moves only when groups
            are lost or come back.
        groups, spares: of so many groups, and of more, `spares` stand by: no slot is dealt to them while the others
            are there.
    """

    on_loss: OnLoss = "redistribute"
    homes: int = 0
    groups: int = 0
    spares: int = 0

    def at_work(self, able: Sequence[Row], pace: Mapping[int, float]) -> list[Row]:
        """Those of the groups that have the state to which slots are dealt. A group that is slow, or has just come
        back, stands by while there is another one."""
        most = max(self.groups, len(able)) - self.spares
        return sorted(able, key=lambda row: (pace[row.group] > 1.0, row.slot_us == 0, row.group))[:most]


EVENLY = Dealing()


def plan(rows: Sequence[Row], slots: int, dealing: Dealing = EVENLY, audited: tuple[int, ...] = ()) -> Plan:
    """Split the slots that nobody holds among the groups that compute, so that all are done as early as can be.

    Args:
        rows: one per group in the quorum, in any order.
        slots: S.
        dealing: of the run.
        audited: slots that two groups compute, in order.

    Returns:
        the plan; `shares` and what is held after `drops` cover each slot exactly once under `redistribute`.
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
    at: dict[int, list[int]] = {row.group: [] for row in dealing.at_work(able, pace)}
    if homes := dealing.homes:
        for slot in certain:
            if slot % homes in at:
                at[slot % homes].append(slot)
        certain = [slot for slot in certain if slot % homes not in at]
    shares = {row.group: () for row in able} | _deal(certain, at, pace, each=not holders)
    doubts: dict[int, list[int]] = {group: [] for group in shares}
    for slot in sorted(doubted):
        asked = _who_is_asked(slot, able, {group: len(share) + len(doubts[group]) for group, share in shares.items()})
        doubts[asked].append(slot)
    accepted = frozenset(slot for slot in doubted if _passes(slot, able))
    most = min(ENOUGH + 1, len(able))
    not_finite = frozenset(slot for slot in accepted if sum(slot in row.not_finite for row in able) >= most)
    shares = {group: (*doubts[group], *share) for group, share in shares.items()}
    owners = holders | {slot: group for group, share in shares.items() for slot in share}
    auditors = _auditors(audited, owners, able)
    return Plan(shares, drops, owners, doubted, accepted, not_finite, audited, auditors, pace)


def audited_slots(seed: int, step: int, slots: int, share: float) -> tuple[int, ...]:
    """Which slots of a step are audited: each with this probability, drawn by the seed."""

    def drawn(slot: int) -> float:
        text = f"audit/{seed}/{step}/{slot}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64

    return tuple(slot for slot in range(slots) if share and drawn(slot) < share)


def _auditors(audited: Sequence[int], owners: Mapping[int, int], able: Sequence[Row]) -> dict[int, int]:
    """Who computes audited slots besides their owners: one that has not given its bits yet comes first, then who audits
    the fewest. None where there is no other group but those that dispute what the owner stands by."""
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
    """Whether a refused slot is computed with what checks find in it: it was asked of other groups, and ENOUGH of them
    refused it, or all that there are."""
    refused = sum(slot in row.refused for row in able)
    return refused >= min(ENOUGH, len(able)) and any(slot in row.disputed for row in able)


def _who_is_asked(slot: int, able: Sequence[Row], load: Mapping[int, int]) -> int:
    """The group that computes a refused slot: the one that refused it, as a transient error does not come twice; once
    that disputes it, one that has not refused it; if it is to pass, one for which it was finite, and that does not
    dispute it. Of several the one that refused the fewest slots, then the one with the smallest share."""
    same_group_again, passes = not any(slot in row.disputed for row in able), _passes(slot, able)

    def turn(row: Row) -> tuple[bool, bool, int, int, int]:
        disfavoured = slot in row.not_finite if passes else (slot in row.refused) != same_group_again
        return disfavoured, slot in row.disputed, len(row.refused), load[row.group], row.group

    return min(able, key=turn).group


def at_fault(group: int, rows: Sequence[Row], asked: Mapping[int, int], owners: Sequence[int]) -> frozenset[int]:
    """Slots that say that a group computes wrongly: it disputes them, and they are in the commit from another group
    that was asked for them and did not refuse them.

    Args:
        rows: of the attempt that committed.
        asked: the group that was asked for a refused slot last, as far as `group` knows, unless it was to accept it.
        owners: by slot the group that computed it; -1 for none.
    """
    by_group = {row.group: row for row in rows if row.computes}
    passed = {slot for slot, other in asked.items() if owners[slot] == other and slot not in by_group[other].refused}
    return by_group[group].disputed & passed if group in by_group else frozenset()


def paces(rows: Sequence[Row]) -> dict[int, float]:
    """How many times as long as the fastest group a slot takes each, in quarters; 1.0 for one that is not slow by
    `SLOWER`, or does not know yet."""
    fastest = min((row.slot_us for row in rows if row.slot_us), default=1)
    ratios = {row.group: row.slot_us / fastest for row in rows}
    return {group: round(4 * ratio) / 4 if ratio >= SLOWER else 1.0 for group, ratio in ratios.items()}


def _deal(
    slots: Sequence[int], at: Mapping[int, Sequence[int]], pace: Mapping[int, float], *, each: bool
) -> dict[int, tuple[int, ...]]:
    """Each slot to the group that will have computed it first, besides those `at` it already; the lower group id in a
    tie. All that is at a group then, in order.

    Args:
        pace: how long a slot takes each group.
        each: begin with one slot for each group that has none: only a group that computes can say that it became
            faster.
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
    """Groups to drop so that no slot is held twice: a group holds one sum, so it drops all of it or nothing.

    A group that was wrongly taken for dead comes back holding slots that others computed again meanwhile. Those
    that hold most keep theirs; the lower group id wins a tie.
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
    """Groups whose checksum differs from the one that most groups have.

    Groups that took over their state since the last audit that agreed do not count, where there are others: they have
    what their source had. Where two checksums are equally common, they do count; then the one that the lowest group id
    has is kept: some state has to go on, and every group must pick the same.
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
    """What is summed beside the gradients: of one group, or over all of them.

    Attributes:
        coverage: for each slot the number of groups that put it into the sum.
        sums: tokens, losses and further sums of the slots.
        leaving: groups that stop after this step.
        exhausted: groups that found no more data.
        refused: groups whose checks refused what is in the sum of the gradients.
        wanting: ranks of this column that want a quorum before the next step. Each column has others.
        bits: for each audited slot those that its owner has and those that its auditor has, 0 for none.
    """

    coverage: tuple[int, ...]
    sums: SlotSums
    leaving: int
    exhausted: int
    refused: int
    wanting: int = 0
    bits: tuple[int, ...] = ()

    def encode(self) -> torch.Tensor:
        """As a float64 vector; sums of such vectors are tallies again."""
        flags = [self.leaving, self.exhausted, self.refused, self.wanting, *self.bits]
        counts = torch.tensor([*self.coverage, *flags], dtype=torch.float64)
        return torch.cat([counts, self.sums.tokens, self.sums.loss, self.sums.extra])

    @staticmethod
    def decode(vector: torch.Tensor, slots: int, audited: int = 0) -> "Tally":
        """The inverse of `encode`, for S = `slots`, so many of which are audited."""
        size = slots + FLAGS + 2 * audited
        counts, tokens, loss, extra = vector.split([size, slots, slots, len(vector) - size - 2 * slots])
        coverage, flags, bits = (
            tuple(round(count) for count in part.tolist()) for part in counts.split([slots, FLAGS, 2 * audited])
        )
        leaving, exhausted, refused, wanting = flags
        sums = SlotSums(tokens, loss, extra, frozenset())
        return Tally(coverage, sums, leaving, exhausted, refused, wanting, bits)

    def digest(self) -> int:
        """62 bits over what decides about the step; equal on all ranks of a group that saw the same sums."""
        whole = (self.coverage, self.leaving, self.exhausted, self.refused, self.bits, self.sums.tokens.tolist())
        return int.from_bytes(hashlib.blake2b(repr(whole).encode(), digest_size=8).digest(), "little") >> 2


def differing_bits(tally: Tally, plan: Plan) -> frozenset[int]:
    """Audited slots of which owner and auditor have different bits; not those that pass, as nobody is left to ask."""
    pairs = zip(plan.audited, tally.bits[::2], tally.bits[1::2], strict=True)
    return frozenset(slot for slot, own, other in pairs if own and other and own != other) - plan.accepted


def verdict(tally: Tally, on_loss: OnLoss = "redistribute") -> str:
    """Why a sum with this tally is not the step; empty if it is."""
    coverage = tally.coverage
    if tally.refused:
        return "a slot in the sum was refused"
    twice = [slot for slot, count in enumerate(coverage) if count > 1]
    if twice:
        return f"slots {twice} are in the sum more than once"
    missing = [slot for slot, count in enumerate(coverage) if count < 1]
    if missing and (on_loss == "redistribute" or len(missing) == len(coverage)):
        return f"slots {missing} are missing from the sum"
    return ""
