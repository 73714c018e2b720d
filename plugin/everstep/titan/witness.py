"""Refused slots between groups: what this rank says of them, hears of them, and makes of it.

A slot that a group refused twice is computed by another one, which looks at all of it. Each rank hears what the same
rank of the other groups saw (`everstep.attention.evidence`), before the attempt's slots are computed. That a witness
refused nothing is known from the commit: the slot is in it, and the witness is its owner.
"""

from collections.abc import Mapping, Sequence

from torchtitan.tools.logging import logger

from everstep.attention.evidence import Statement, Verdict, encode
from everstep.attention.guard import Checks, Judgement
from everstep.run.events import EventLog
from everstep.run.exits import UNFIT_EXIT
from everstep.step.interfaces import Commit, Doubt


class Witnesses:
    """One rank's part in it.

    Args:
        checks: this rank's.
        group: this rank's.
        events: of this rank.
    """

    def __init__(self, checks: Checks, group: int, events: EventLog) -> None:
        self._checks, self._group, self._events = checks, group, events
        self._step = 0
        self._doubted: set[int] = set()
        self._asked: dict[int, int] = {}
        """Slot → the group that has computed it and looked at all of it, once it is in a commit."""

    def doubted(self, step: int, slot: int) -> bool:
        """Whether some group refused this slot, so that all of it is looked at."""
        return step == self._step and slot in self._doubted

    def testify(self, slots: Sequence[int]) -> bytes:
        """See `Work.testify`."""
        return self._checks.statement(slots).encode()

    def weigh(self, step: int, doubts: Sequence[Doubt], said: Mapping[int, bytes]) -> None:
        """See `Work.weigh`. Raises SystemExit where this rank is at fault and nobody is left to ask."""
        self._step = step
        self._doubted = {doubt.slot for doubt in doubts}
        self._asked.clear()
        seen: dict[int, Statement] = {}
        for group, statement in said.items():
            try:
                seen[group] = Statement.decode(statement) if statement else Statement()
            except ValueError as error:
                logger.warning(f"Group {group} says of refused slots what cannot be read: {error}")
        for statement in seen.values():
            self._checks.learn(statement.allowed)
        for doubt in doubts:
            told = {group: said.seen[doubt.slot] for group, said in seen.items() if doubt.slot in said.seen}
            if not doubt.held or told.get(doubt.asked) == ():
                self._asked[doubt.slot] = doubt.asked
            # One that saw nothing while another rank of its group refused the slot counts when all have done so.
            witnesses = [
                evidence for group, evidence in told.items() if group != self._group and (evidence or doubt.alone)
            ]
            judged = self._checks.judge(doubt.slot, witnesses, alone=doubt.alone)
            if tell(self._events, step, doubt.slot, judged, len(witnesses)):
                raise SystemExit(UNFIT_EXIT)

    def answered(self, commit: Commit) -> bool:
        """What other groups computed is in a commit; whether it shows that this rank is at fault."""
        if commit.step != self._step:
            return False
        leaves = False
        for slot, asked in self._asked.items():
            if commit.owners[slot] == asked != self._group:
                leaves |= tell(self._events, commit.step, slot, self._checks.judge(slot, [()]), witnesses=1)
        self._asked.clear()
        return leaves


def tell(events: EventLog, step: int, slot: int, judged: Judgement, witnesses: int = 0) -> bool:
    """Tell of a judgement; whether this rank leaves."""
    if judged.leaves:
        logger.error(judged.reason)
        events.emit("unfit", step, slot=slot, reason=judged.reason, witnesses=witnesses)
    elif judged.reason:
        logger.warning(judged.reason)
        kind = "bound_suspect" if judged.verdict is Verdict.BOUND else "not_finite"
        evidence = encode(judged.evidence)
        events.emit(kind, step, slot=slot, reason=judged.reason, witnesses=witnesses, evidence=evidence)
    return judged.leaves
