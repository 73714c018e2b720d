"""The checks as the training step calls them (`Checks`), and as one module of the model calls them (`Guard`).

A *check* of a layer runs in the slots for which the schedule drew the layer. A *look* is cheap, and runs in every slot
or in those in which the layer is not checked. A slot is the forward and the backward of one microbatch.
"""

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
from .schedule import CheckRate, Schedule
from .section import AttentionCheck


class _Slot(NamedTuple):
    """The times of one slot: events of the device, or seconds if there is none. checks, looks: beginnings and ends of
    the checks of the layers that were drawn, and of the looks. layers: number of layers that were drawn."""

    begin: Any
    end: Any
    checks: list[tuple[Any, Any]]
    looks: list[tuple[Any, Any]]
    layers: int

    def over(self) -> bool:
        """Return whether the device has finished the slot."""
        return isinstance(self.end, float) or self.end.query()


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


LARGE_STEP = 65_536
"""Labels of an optimizer step. In a step with so many or more, one lost row of P (an infinite score makes its sum 0)
changes no gradient by 1 %. `bench/attention_extremes.py` finds changes of up to 0.34 %. They fall with the root of the
number of labels."""


KEPT_BYTES = 32 << 20
"""Bytes of results that are kept, so that one look takes them together. Right after a product, when a CPU's
caches are full of its data, a look takes several times as long."""


class Checks:
    """The attention check of one rank, as the training step calls it.

    Call `begin` before a slot's forward, `end` after its backward, `refused` before any result of the slot is used, and
    `forget` once the weights changed. Between slots, for example in a validation, nothing is checked.

    Args:
        section: the config's `[attention_check]`.
        rank: this rank. Findings name it, and the injector draws the faults of each rank separately.
        seed: the layers to check are drawn from it and the rank.
    """

    def __init__(self, section: AttentionCheck, *, rank: int = 0, seed: int = 0) -> None:
        self.mode = section.mode
        self.findings = FindingLog(rank)
        self.schedule = Schedule(section.rate(), section.max_overhead, seed=seed + rank)
        self.injector = Injector(section.inject, rank)
        self.weights_version = 0
        """A number that changes with the weights and after findings. Kept sums of weights are valid for one version."""
        self.looks_at_rows = False
        """Whether lost rows of P and scores below -EXTREME_SCORE are looked for in layers that are not checked: in
        steps smaller than LARGE_STEP. May change between slots."""
        self.coverage = ""
        """How much of the model is guarded, e.g. "12 of 12"; empty if that was not counted."""
        self.masks: dict[int, Any] = {}
        """The masks of the model's last forward, by the address of the tensor that identifies each."""
        self._step = self._slot = 0
        self._between_slots = True
        self._begun: Any = None
        self._timed: list[tuple[Any, Any]] = []
        self._looks: list[tuple[Any, Any]] = []
        self._later: defaultdict[Callable[[list[Any]], None], list[Any]] = defaultdict(list)
        self._kept_bytes = 0
        self._slots: deque[_Slot] = deque()
        self._told: CheckRate | None = None
        # Asked once, because looking for a device takes as long as a small check.
        self._device = torch.accelerator.current_accelerator(check_available=True)

    def guard(self, layer: int, name: str, sections: tuple[str, ...]) -> "Guard":
        """Make the guard of one module. `sections` are the results into which faults can be injected."""
        self.injector.register(layer, sections)
        self.schedule.add(layer)
        return Guard(self, layer, name)

    def begin(self, step: int, slot: int, *, check_all: bool = False) -> None:
        """Begin a slot, before its forward. step counts from 1. check_all: check every layer, whatever the rate."""
        self._step, self._slot, self._between_slots = step, slot, False
        self._timed, self._looks, self._kept_bytes = [], [], 0
        self._begun = self.now()
        self.schedule.begin(step, slot, check_all=check_all)
        self.injector.begin(step)

    def end(self) -> None:
        """End a slot, after its backward, with the looks at what was kept of it. No host synchronisation here, but the
        checks of explicit attention make their own."""
        self.look()
        if self.schedule.fixed is None:
            layers = len(self.schedule.checked)
            self._slots.append(_Slot(self._begun, self.now(), self._timed, self._looks, layers))
        self.schedule.checked, self._between_slots = frozenset(), True

    def refused(self) -> frozenset[int]:
        """Return the slots, of those since the last call, that must be computed again. One host synchronisation, none
        if nothing was recorded."""
        self.look()  # at what is left if `end` was not called
        refused = self.findings.refused()
        # If nothing of a slot was read just now, the device may still be busy with it.
        while self._slots and self._slots[0].over():
            slot = self._slots.popleft()
            checks_s, looks_s = (sum(_between(*times) for times in part) for part in (slot.checks, slot.looks))
            self.schedule.slot_took(_between(slot.begin, slot.end), checks_s, slot.layers, looks_s)
        for finding in self.findings.last:
            self.schedule.found(finding["layer"], finding["step"])
        if self.findings.last:
            self.weights_version += 1  # since the kept sums of weights may have been wrong
        return refused

    def record(self, layer: int, section: str, action: str, again: bool, worst: torch.Tensor, bound: float) -> None:
        """Keep one check's outcome in the current slot; see `findings.Record`. Between slots nothing happens."""
        if self._between_slots:
            return
        self.findings.record(Record(self._step, self._slot, layer, section, action, again, worst, bound))

    def look_later(self, look: Callable[[list[Any]], None], given: Any, kept_bytes: int = 0) -> None:
        """Have `look` called with the list of what was given for it: at the end of the slot, and earlier whenever the
        results that all looks keep exceed KEPT_BYTES.

        Args:
            kept_bytes: memory that `given` holds; 0 if `look` can wait until after the backward.
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
        """Call all looks that `look_later` put off."""
        if self._later:
            with self.timing(self._looks):
                for look, given in self._later.items():
                    look(given)
            self._later.clear()

    @contextlib.contextmanager
    def timing(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        """Add the time that the block takes to `spans`, if the rate is adaptive."""
        if self.schedule.fixed is not None:
            yield
            return
        begin = self.now()
        yield
        spans.append((begin, self.now()))

    def forget(self) -> None:
        """Drop what was seen since the last call of `refused`, and the kept sums of weights. Called before slots with
        other weights, and when slots are not used."""
        self._later.clear()
        self.findings.forget()
        self.weights_version += 1

    def changed_rate(self) -> dict[str, float] | None:
        """Return the overhead and the rate of the checks, as the fields of an event, if one of them changed by a
        quarter since they were last returned; else None. A fixed rate is returned once."""
        fixed, told = self.schedule.fixed, self._told
        rate = self.schedule.check_rate if fixed is None else CheckRate(0.0, fixed)
        if rate is None or (
            told is not None and all(0.8 < (x + 1e-9) / (y + 1e-9) < 1.25 for x, y in zip(rate, told, strict=True))
        ):
            return None
        self._told = rate
        return rate._asdict() if fixed is None else {"rate": fixed}

    def now(self) -> Any:
        """Return a point in the device's queue, as an event; without a device the time in seconds."""
        if self._device is None:
            return time.perf_counter()
        point = torch.Event(self._device, enable_timing=True)
        point.record()
        return point


EXTREME = 1e10
"""Magnitude above which an element of a projection is near-INF, as in ATTNChecker (arXiv 2410.11720)."""

EXTREME_SCORE = 1e4
"""Magnitude above which a score is extreme. Attention does not work with such scores."""

_numbers = itertools.count()
_guards: WeakValueDictionary[int, "Guard"] = WeakValueDictionary()


def guard_of(ticket: torch.Tensor) -> "Guard":
    """Return the guard with this ticket. Raises KeyError if it no longer exists."""
    return _guards[int(ticket)]


class Guard:
    """The checks as one module calls them. Made by `Checks.guard`."""

    def __init__(self, checks: Checks, layer: int, name: str) -> None:
        self.checks, self.layer, self.name = checks, layer, name
        self.correct = checks.mode == "correct"
        self.ticket = torch.tensor(next(_numbers))
        """This guard's number, which stands for it in a compiled graph. A tensor, since a plain number would be
        compiled in, once for each layer; see `operators`."""
        self.kept: dict[str, Any] = {}
        """The sums of weights that a projection keeps from call to call."""
        self.narrow = False
        """Whether this attention's kernel accepts values with fewer columns than the keys have. A check runs the kernel
        a second time, on sums of V's columns."""
        self.kernel: Callable[[torch.Tensor | None, float, bool], Any] | None = None
        """Makes this attention's kernel, a `fused.Attend`, for that second run outside of a compiled graph. It takes
        the tensor that identifies the mask, the scale, and whether the kernel returns lse."""
        _guards[int(self.ticket)] = self

    @property
    def checked(self) -> bool:
        """Whether this module's layer is checked in this slot."""
        return self.layer in self.checks.schedule.checked

    @property
    def runs_unguarded(self) -> bool:
        """Whether this module may run as if it had no guard, apart from the looks: its layer is not checked in this
        slot, and no faults are injected."""
        return not (self.checked or self.checks.injector.active)

    def timing(self) -> contextlib.AbstractContextManager[None]:
        """Measure the time of a check, or of a part of it, in a layer that was drawn."""
        return self.checks.timing(self.checks._timed)  # noqa: SLF001

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """Measure the time of a look."""
        return self.checks.timing(self.checks._looks)  # noqa: SLF001

    def inject(
        self, section: str, result: torch.Tensor, *, backward: bool = False, part: int = 0, parts: int = 1
    ) -> torch.Tensor:
        """Return `result`, or a copy with the injected fault that is due. Checkpointing's second forward gets none."""
        if not backward and recomputing():
            return result
        fault = self.checks.injector.fault_for(self.layer, section, part, parts)
        return result if fault is None else inject(result, fault)

    def report(
        self, section: str, worst: torch.Tensor, action: str, *, backward: bool = False, bound: float = 1.0
    ) -> None:
        """Record one check's outcome: the result is wrong unless worst / bound <= 1. action: what was then done."""
        self.checks.record(self.layer, section, action, not backward and recomputing(), worst, bound)

    def look_at_scores(self, section: str, lse: torch.Tensor | None) -> None:
        """Refuse the slot if a score of a kernel is NaN or above EXTREME_SCORE. lse: the log-sum-exp of each row, -INF
        for a row that sees no key. If lse is None, because the kernel does not return it, nothing happens."""
        if lse is not None:
            with unseen_by_checkpointing(), self.looking():
                self.report(section, lse.detach().amax(), "refused", bound=EXTREME_SCORE)


def look_for_extremes(results: Iterable[tuple[Guard, str, torch.Tensor]]) -> None:
    """Refuse the slot if an element of a projection's result is INF, NaN or near-INF. For layers that are not checked
    in this slot; a check finds these values itself. In the forward only: what the backward computes ends in gradients,
    which the step protocol tests likewise.

    Args:
        results: a guard, a section and the detached result of each projection.
    """
    with unseen_by_checkpointing():
        for guard, section, result in results:
            least, most = result.aminmax()
            guard.report(section, least, "refused", bound=-EXTREME)
            guard.report(section, most, "refused", bound=EXTREME)
