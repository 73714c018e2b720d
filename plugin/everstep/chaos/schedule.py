"""Decides when a fault is due: at regular intervals, or at the steps and times of a campaign file."""

import random
from collections.abc import Sequence

from everstep.chaos.fault import Fault
from everstep.chaos.kinds import why_not
from everstep.chaos.target import Target

Due = tuple[Fault, random.Random]
"""A fault that is due, and the generator that it draws from."""


class Schedule:
    """The faults of a campaign at their steps and times, and in addition, or alone, one of `faults` every `every_s`.

    Each fault of a campaign has its own generator, so one that waits does not change the draws of the others. Periodic
    ones are drawn from those that can be done then; after one that had to wait the next comes a full `every_s` later.
    Their clock starts when a group takes part in a step.
    """

    def __init__(
        self, entries: Sequence[Fault] = (), seed: int = 0, every_s: float | None = None, faults: Sequence[Fault] = ()
    ):
        self._pending = [(fault, random.Random(f"{seed}.{index}")) for index, fault in enumerate(entries)]
        self._waits_since: dict[int, float] = {}
        self._given_up: list[str] = []
        self._every_s, self._faults = every_s, list(faults)
        self._random = random.Random(seed)
        self._next: float | None = None

    def due(self, target: Target, now: float) -> Due | None:
        """Return a fault that is due and can be done now; call again for the next. `now` is `time.monotonic()`."""
        begun = target.run.first_commit
        for entry in list(self._pending):
            fault, _ = entry
            if begun is None or not fault.is_due(target.run.step, now - begun):
                continue
            since = self._waits_since.setdefault(id(fault), now)
            reason = why_not(fault, target)
            if reason is None:
                self._pending.remove(entry)
                return entry
            if now - since > fault.patience_s:
                self._pending.remove(entry)
                self.give_up(fault, f" within {fault.patience_s:g} s: {reason}")
        return self._every_so_often(target, now, self._every_s) if self._every_s is not None else None

    def _every_so_often(self, target: Target, now: float, every_s: float) -> Due | None:
        if self._next is None and target.run.taking_part:
            self._next = now + every_s
        is_due = self._next is not None and now >= self._next
        possible = [fault for fault in self._faults if why_not(fault, target) is None] if is_due else []
        if not possible:
            return None
        self._next = now + every_s
        return self._random.choice(possible), self._random

    def give_up(self, fault: Fault, why: str) -> None:
        """Note that a fault of the campaign is not done. A periodic fault is not noted, as another one follows."""
        if fault.at_step is not None or fault.at_s is not None:
            self._given_up.append(f"{fault.name} at {fault.when} could not be done{why.rstrip('.')}.")

    def finished(self) -> bool:
        """Whether no fault will become due any more."""
        return not self._pending and self._every_s is None

    def unmet(self) -> list[str]:
        """Return a sentence for each fault of the campaign that was not done."""
        return self._given_up + [f"{fault.name} at {fault.when} was not done by the end." for fault, _ in self._pending]
