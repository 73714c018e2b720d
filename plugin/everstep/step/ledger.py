"""Who holds which slots of a step: pure decisions, no processes and no tensors.

A step is S slots. Every attempt begins with one exchange, in which each group of the quorum tells the others a `Row`:
whether it can compute, and the slots whose gradients it still holds from an earlier attempt at the same step. From
the same rows every group makes the same `Plan`. The attempt ends with a second exchange, in which the number of
groups that put each slot into the sum is counted; `verdict` says whether that sum is the step.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BITS_PER_WORD = 62  # an int64 word sums without touching its sign
ROW_HEADER = 5


@dataclass(frozen=True, slots=True)
class Row:
    """What one group says at the beginning of an attempt.

    Attributes:
        group: its group id.
        step: the last step it committed; -1 when it has nothing.
        computes: whether it can compute slots now. False for a group that heals in this attempt.
        checksum: of its parameters after `step`, 63 bits, or None when no audit is due.
        held: slots of step + 1 whose gradients it holds.
    """

    group: int
    step: int
    computes: bool
    checksum: int | None = None
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """What an attempt does, the same on every group.

    Attributes:
        shares: group id → slots it computes, in order; every group that computes has an entry, perhaps an empty one.
        drops: groups that let go of what they hold, since another group holds one of their slots as well.
        differing: groups whose parameters the audit found different; they take no part and heal in the next quorum.
    """

    shares: dict[int, tuple[int, ...]]
    drops: frozenset[int]
    differing: frozenset[int]


def words(slots: int) -> int:
    """Length of an encoded row in int64 words, for S = `slots`."""
    return ROW_HEADER + -(-slots // BITS_PER_WORD)


def encode(row: Row, slots: int) -> list[int]:
    """The row as `words(slots)` integers that fit int64. All zeros is kept free: it means nobody spoke."""
    packed = [0] * (words(slots) - ROW_HEADER)
    for slot in row.held:
        packed[slot // BITS_PER_WORD] |= 1 << slot % BITS_PER_WORD
    audited, checksum = (0, 0) if row.checksum is None else (1, row.checksum)
    return [row.group + 1, row.step, int(row.computes), audited, checksum, *packed]


def decode(values: Sequence[int], slots: int) -> Row:
    """The inverse of `encode`. Raises ValueError where nobody spoke."""
    group, step, computes, audited, checksum, *packed = values
    if group == 0:
        raise ValueError("no group spoke here")
    held = frozenset(s for s in range(slots) if packed[s // BITS_PER_WORD] >> s % BITS_PER_WORD & 1)
    return Row(group - 1, step, bool(computes), checksum if audited else None, held)


def plan(rows: Sequence[Row], slots: int, on_loss: Literal["redistribute", "shrink"] = "redistribute") -> Plan:
    """Split the slots that nobody holds among the groups that compute.

    Args:
        rows: one per group in the quorum, in any order.
        slots: S.
        on_loss: `shrink` computes nothing for lost slots as long as some group still holds one.

    Returns:
        the plan; `shares` and what is held after `drops` cover each slot exactly once under `redistribute`.
    """
    differing = differing_groups(rows)
    able = sorted((row for row in rows if row.computes and row.group not in differing), key=lambda row: row.group)
    drops = _conflicting(able)
    held = frozenset().union(*(row.held for row in able if row.group not in drops)) if able else frozenset()
    missing = [slot for slot in range(slots) if slot not in held]
    if on_loss == "shrink" and held:
        missing = []
    shares = {row.group: tuple(missing[i :: len(able)]) for i, row in enumerate(able)}
    return Plan(shares, drops, differing)


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
    """Groups whose checksum differs from the one that most groups at the newest audited step have.

    Where two checksums are equally common, the one that the lowest group id has is kept: some state has to go on,
    and every group must pick the same.
    """
    audited = [row for row in rows if row.checksum is not None and row.computes]
    if not audited:
        return frozenset()
    newest = max(row.step for row in audited)
    audited = sorted((row for row in audited if row.step == newest), key=lambda row: row.group)
    counts = Counter(row.checksum for row in audited)
    kept = max(audited, key=lambda row: (counts[row.checksum], -row.group)).checksum
    return frozenset(row.group for row in audited if row.checksum != kept)


def verdict(coverage: Sequence[int], on_loss: Literal["redistribute", "shrink"] = "redistribute") -> str | None:
    """Why a sum with this coverage is not the step, or None if it is.

    Args:
        coverage: for each slot the number of groups that put it into the sum.
    """
    twice = [slot for slot, count in enumerate(coverage) if count > 1]
    if twice:
        return f"slots {twice} are in the sum more than once"
    missing = [slot for slot, count in enumerate(coverage) if count < 1]
    if missing and (on_loss == "redistribute" or len(missing) == len(coverage)):
        return f"slots {missing} are missing from the sum"
    return None


def life(group: int, incarnation: str) -> int:
    """A 40-bit number for one start of a group's workers. Sums of them over the groups of a commit, exact in float64,
    tell commits of one step by different lives apart."""
    return int.from_bytes(hashlib.blake2b(f"{group}/{incarnation}".encode(), digest_size=5).digest(), "little")


def common_value(total: float, squares: float, count: int) -> int:
    """The integer that `count` summands all are, from their sum and the sum of their squares; -1 if they differ."""
    value = round(total / count)
    return value if value * count == total and value * value * count == squares else -1
