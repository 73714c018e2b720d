"""What a checked module asks before a check and tells after it."""

import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from .findings import FindingLog, Record
from .injection import Injector, inject
from .private import recomputing, unseen_by_checkpointing
from .schedule import Plan, Schedule
from .section import AttentionCheck


class _Slot(NamedTuple):
    """What was timed in a slot: events of a device, or seconds without one. checks, looks: beginnings and ends, of the
    checks of the layers that were drawn, and of what is looked at in every slot."""

    begin: Any
    end: Any
    checks: list[tuple[Any, Any]]
    looks: list[tuple[Any, Any]]
    layers: int

    def over(self) -> bool:
        """Whether the device has done all of it."""
        return isinstance(self.end, float) or self.end.query()


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


SMALL_STEP = 65_536
"""Tokens of a step from which on the loss of one row of one head (an infinite score) changes no gradient by 1 %:
0.34 % is the most that `bench/attention_extremes.py` finds, and it falls as the root of the tokens."""


KEPT_BYTES = 32 << 20
"""Of results that are looked at together: between two products, which fill a CPU's caches, a look takes several times
as long."""


class Checks:
    """The attention check of one rank: what the training step talks to.

    `begin` before a slot's forward, `end` after its backward, `refused` before anything of it is used,
    `weights_changed` after the step. Between slots, as in a validation, nothing is checked.

    Args:
        section: the config's `[attention_check]`.
        rank: this rank, named in findings and drawn upon by the injector.
        seed: draws which layers are checked when the frequency is not 0 or 1.
        step_tokens: tokens of a step.
    """

    def __init__(self, section: AttentionCheck, *, rank: int = 0, seed: int = 0, step_tokens: int = SMALL_STEP) -> None:
        self.mode = section.mode
        self.findings = FindingLog(rank)
        self.schedule = Schedule(section.rate(), section.max_overhead, seed=seed + rank)
        self.injector = Injector(section.inject, rank)
        self.weights_version = 0
        """Changes whenever weights do: sums of weights are kept under it."""
        self.looks_at_rows = step_tokens < SMALL_STEP
        """Whether a lost row of P, in the forward or the backward, refuses the slot at any rate."""
        self.coverage = ""
        """What of the model is guarded, where that was counted."""
        self.masks: dict[int, Any] = {}
        """The masks of the slot, by the address of the tensor that tells them apart."""
        self._step = self._slot = 0
        self._between_slots = False
        self._begun: Any = None
        self._timed: list[tuple[Any, Any]] = []
        self._looks: list[tuple[Any, Any]] = []
        self._later: defaultdict[Callable[[list[Any]], None], list[Any]] = defaultdict(list)
        self._kept_bytes = 0
        self._slots: deque[_Slot] = deque()
        self._told: Plan | None = None
        # Asked once: to look for a device takes as long as a small check.
        self._device = torch.accelerator.current_accelerator(check_available=True)

    def guard(self, layer: int, name: str, sections: tuple[str, ...]) -> "Guard":
        """The guard of one module; `sections` are the results it can check."""
        self.injector.register(layer, sections)
        self.schedule.add(layer)
        return Guard(self, layer, name)

    def begin(self, step: int, slot: int, *, whole: bool = False) -> None:
        """A slot's forward is about to run. step counts from 1. whole: check every call of it, at whatever rate."""
        self._step, self._slot, self._between_slots = step, slot, False
        self._timed, self._looks, self._kept_bytes = [], [], 0
        self._begun = self.now()
        self.schedule.begin(step, slot, whole=whole)
        self.injector.begin(step)

    def end(self) -> None:
        """A slot's backward has run: what was kept of it is looked at. No host synchronisation."""
        self.look()
        if self.schedule.fixed is None:
            layers = len(self.schedule.checked)
            self._slots.append(_Slot(self._begun, self.now(), self._timed, self._looks, layers))
        self.schedule.checked, self._between_slots = frozenset(), True

    def refused(self) -> frozenset[int]:
        """Slots, of those since this was last asked, that must be computed again. One host synchronisation."""
        self.look()
        refused = self.findings.refused()
        # A slot of which nothing was read may not be over yet.
        while self._slots and self._slots[0].over():
            slot = self._slots.popleft()
            checks_s, looks_s = (sum(_between(*times) for times in part) for part in (slot.checks, slot.looks))
            self.schedule.slot_took(_between(slot.begin, slot.end), checks_s, slot.layers, looks_s)
        for finding in self.findings.last:
            self.schedule.found(finding["layer"], finding["step"])
        if self.findings.last:
            self.weights_changed()  # what is kept of them may be what was wrong
        return refused

    def record(self, layer: int, section: str, action: str, again: bool, worst: torch.Tensor, bound: float) -> None:
        """One check's outcome, of the slot that was begun; see `findings.Record`."""
        if self._between_slots:
            return
        self.findings.record(Record(self._step, self._slot, layer, section, action, again, worst, bound))

    def look_later(self, look: Callable[[list[Any]], None], given: Any, kept_bytes: int = 0) -> None:
        """Have `look` called with all that is given to it, once the slot is over.

        Args:
            kept_bytes: by `given`; above KEPT_BYTES in all it is called at once. 0: only after the backward.
        """
        if self._between_slots:
            return
        self._later[look].append(given)
        self._kept_bytes += kept_bytes
        if self._kept_bytes > KEPT_BYTES:
            with self.timing(self._looks):
                look(self._later.pop(look))
            self._kept_bytes = 0

    def look(self) -> None:
        """Look at all that was to be looked at later."""
        if self._later:
            with self.timing(self._looks):
                for look, given in self._later.items():
                    look(given)
            self._later.clear()

    @contextlib.contextmanager
    def timing(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        """Adds a span of time, for an adaptive rate."""
        if self.schedule.fixed is not None:
            yield
            return
        begin = self.now()
        yield
        spans.append((begin, self.now()))

    def forget(self) -> None:
        """What was computed since `refused` was last asked is not used."""
        self._later.clear()
        self.findings.forget()

    def drain(self) -> list[dict[str, Any]]:
        """Findings since the last call, as the fields of `finding` events."""
        return self.findings.drain()

    def news(self) -> dict[str, float] | None:
        """What the checks take and how often they are made, as the fields of an event, where that changed by a quarter
        since it was last told; else None. Of a fixed rate, once."""
        fixed, told = self.schedule.fixed, self._told
        plan = self.schedule.plan if fixed is None else Plan(0.0, fixed)
        if plan is None or (
            told is not None and all(0.8 < (x + 1e-9) / (y + 1e-9) < 1.25 for x, y in zip(plan, told, strict=True))
        ):
            return None
        self._told = plan
        return plan._asdict() if fixed is None else {"rate": fixed}

    def weights_changed(self) -> None:
        """Weights changed: a commit, a heal, a checkpoint."""
        self.weights_version += 1

    def now(self) -> Any:
        """A point in what the device was given to do; without one, in seconds."""
        if self._device is None:
            return time.perf_counter()
        point = torch.Event(self._device, enable_timing=True)
        point.record()
        return point


EXTREME = 1e10
"""An element of a projection beyond this is near-INF, as ATTNChecker (arXiv 2410.11720) has it."""

EXTREME_SCORE = 1e4
"""No score that attention can do with is larger."""

_numbers = itertools.count()
_guards: WeakValueDictionary[int, "Guard"] = WeakValueDictionary()


def guard_of(ticket: torch.Tensor) -> "Guard":
    """The guard whose ticket this is."""
    return _guards[int(ticket)]


class Guard:
    """One module's side of the checks."""

    def __init__(self, checks: Checks, layer: int, name: str) -> None:
        self.checks, self.layer, self.name = checks, layer, name
        self.correct = checks.mode == "correct"
        self.ticket = torch.tensor(next(_numbers))
        """This guard's number, which stands for it in a compiled graph."""
        self.kept: dict[str, Any] = {}
        """What a projection keeps from call to call."""
        self.narrow = False
        """Whether this attention's kernel takes values of fewer columns than keys have."""
        self.kernel: Callable[[torch.Tensor | None, float, bool], Any] | None = None
        """This attention's kernel outside of a graph, a `fused.Attend`, by what tells its mask, its scale and whether
        it hands out lse; of an attention in a compiled model."""
        _guards[int(self.ticket)] = self

    @property
    def checked(self) -> bool:
        """Whether this module's layer is checked in this slot."""
        return self.layer in self.checks.schedule.checked

    @property
    def idle(self) -> bool:
        """Whether nothing of this module's layer is checked or hit in this slot: it may run as if it had no guard, but
        for what is looked at in every slot."""
        return not (self.checked or self.checks.injector.active)

    def timing(self) -> contextlib.AbstractContextManager[None]:
        """Around a check of a layer that was drawn, or a part of one: measures what it takes, for an adaptive rate."""
        return self.checks.timing(self.checks._timed)  # noqa: SLF001

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """The same, around what is looked at in every slot."""
        return self.checks.timing(self.checks._looks)  # noqa: SLF001

    def touch(
        self, section: str, result: torch.Tensor, *, backward: bool = False, part: int = 0, parts: int = 1
    ) -> torch.Tensor:
        """`result`, or a copy with the fault that is due in it. A forward's second run is spared."""
        if not backward and recomputing():
            return result
        fault = self.checks.injector.strike(self.layer, section, part, parts)
        return result if fault is None else inject(result, fault)

    def report(
        self, section: str, worst: torch.Tensor, action: str, *, backward: bool = False, bound: float = 1.0
    ) -> None:
        """Hand over one check's outcome, in units of `bound`; action: what became of what is wrong."""
        self.checks.record(self.layer, section, action, not backward and recomputing(), worst, bound)

    def look_at_scores(self, section: str, lse: torch.Tensor | None) -> None:
        """As `look_for_extremes`, of a kernel's scores, by the logarithms of the rows' sums of exponentials if it hands
        them out: a row that sees nothing has -INF."""
        if lse is not None:
            with unseen_by_checkpointing(), self.looking():
                self.report(section, lse.detach().amax(), "refused", bound=EXTREME_SCORE)


def look_for_extremes(results: Iterable[tuple[Guard, str, torch.Tensor]]) -> None:
    """Refuse the slot if an element of a projection's result is INF, NaN or near-INF; in every call, at any rate.
    What the backward makes ends in gradients, of which the step protocol asks the same.

    Args:
        results: with their sections, without their histories.
    """
    with unseen_by_checkpointing():
        for guard, section, result in results:
            least, most = result.aminmax()
            guard.report(section, least, "refused", bound=-EXTREME)
            guard.report(section, most, "refused", bound=EXTREME)
