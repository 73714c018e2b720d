"""When which fault is due: every so many seconds, or as a campaign file says."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.chaos.fault import Fault
from everstep.chaos.target import Target


@dataclass(frozen=True)
class Due:
    """A fault whose time has come, and where it draws from."""

    fault: Fault
    choose: random.Random


class Schedule(ABC):
    """Says what is due. Its clock starts when the run has committed a step."""

    @abstractmethod
    def due(self, target: Target, now: float) -> Due | None:
        """A fault that is due and can be done now; asked again, the next one. `now` is `time.monotonic()`."""

    def finished(self) -> bool:
        """Whether nothing will ever be due again."""
        return False

    def unmet(self) -> list[str]:
        """A sentence for each fault that should have been and was not."""
        return []


def why_not(fault: Fault, target: Target) -> str | None:
    """Why a fault cannot be done to the target now; None: it can."""
    if target.kind not in fault.on:
        return f"{fault.name} cannot be done to a {target.kind} target"
    return fault.never(target.run) or fault.why_not(target.run)


class Every(Schedule):
    """Every `every_s` seconds one of `faults`; with `jitter` after a time drawn from half to one and a half of that.
    They come in a random order, all of them before one comes again, as far as they can be done. One that has to wait
    does not bring the next one closer."""

    def __init__(self, every_s: float, faults: Sequence[Fault], seed: int, jitter: bool = False):
        self._every_s, self._faults, self._jitter = every_s, list(faults), jitter
        self._random = random.Random(seed)
        self._deck: list[Fault] = []
        self._due: float | None = None

    def due(self, target: Target, now: float) -> Due | None:
        if self._due is None:
            if target.run.taking_part:
                self._due = now + self._pause_s()
            return None
        if now < self._due:
            return None
        fault = self._first_possible(target)
        if fault is None:
            self._shuffle_in()
            fault = self._first_possible(target)
        if fault is None:
            return None
        self._deck.remove(fault)
        self._due = now + self._pause_s()
        return Due(fault, self._random)

    def _first_possible(self, target: Target) -> Fault | None:
        return next((fault for fault in self._deck if why_not(fault, target) is None), None)

    def _shuffle_in(self) -> None:
        """Put what has been done back beneath what has not."""
        done = [fault for fault in self._faults if fault not in self._deck]
        self._random.shuffle(done)
        self._deck += done

    def _pause_s(self) -> float:
        return self._every_s * (self._random.uniform(0.5, 1.5) if self._jitter else 1.0)


@dataclass
class Entry:
    """A fault of a campaign: due at a committed step, or so many seconds after the first step that was seen."""

    fault: Fault
    at_step: int | None = None
    at_s: float | None = None
    patience_s: float = 60.0
    """How long it may wait for the run to be in a state in which it can be done."""
    waits_since: float | None = None

    def __str__(self) -> str:
        when = f"step {self.at_step}" if self.at_step is not None else f"{self.at_s:g} s"
        return f"{self.fault.name} at {when}"


class Listed(Schedule):
    """The entries of a campaign. Each draws for itself, so that one that waits changes nothing for the others."""

    def __init__(self, entries: Sequence[Entry], seed: int):
        self._left = list(entries)
        self._random = {id(entry): random.Random(f"{seed}.{index}") for index, entry in enumerate(entries)}
        self._given_up: list[str] = []

    def due(self, target: Target, now: float) -> Due | None:
        run = target.run
        if run.first_commit is None:
            return None
        for entry in list(self._left):
            by_step = entry.at_step is not None and run.step >= entry.at_step
            by_time = entry.at_s is not None and now - run.first_commit >= entry.at_s
            if not (by_step or by_time):
                continue
            entry.waits_since = entry.waits_since or now
            reason = why_not(entry.fault, target)
            if reason is None:
                self._left.remove(entry)
                return Due(entry.fault, self._random[id(entry)])
            if now - entry.waits_since > entry.patience_s:
                self._left.remove(entry)
                self._given_up.append(f"{entry} could not be done within {entry.patience_s:g} s: {reason}.")
        return None

    def finished(self) -> bool:
        return not self._left

    def unmet(self) -> list[str]:
        return self._given_up + [f"{entry} did not come up." for entry in self._left]


class Both(Schedule):
    """A campaign's entries, and beside them faults every so often. It has no end while there are those."""

    def __init__(self, *parts: Schedule):
        self._parts = parts

    def due(self, target: Target, now: float) -> Due | None:
        return next((due for part in self._parts if (due := part.due(target, now)) is not None), None)

    def finished(self) -> bool:
        return all(part.finished() for part in self._parts)

    def unmet(self) -> list[str]:
        return [sentence for part in self._parts for sentence in part.unmet()]
