"""Gradient sums over groups, begun while the last backward still runs.

The sums are taken over copies, so that `param.grad` keeps this group's own part for a retry. Parameters are laid
into flat buckets in the order in which backward reaches them, last layer first; the sum of a bucket starts when the
last of its gradients is there and every bucket before it has started, so all groups start them in the same order,
those that compute nothing in this attempt as well.

With exact sums (`everstep.step.exact`) what the group holds is an exact sum. In each slot gradients are added to it,
and leave `param.grad`, as soon as they are there: they are in the processor's cache then, and the next ones take their
memory.

A gradient may be added to several times in one slot: a loss in chunks runs the output layer's backward once a chunk.
How often is counted in each slot, and a gradient is taken to be there when it was added to as often as in any slot
before, or the slot ends.

On a device the hooks run on whatever stream the gradient was accumulated on (FSDP2 has one for its reduce-scatters), so
a bucket may be filled from several: its sum begins after all of them. The memory of a sum that was given up is kept
until the sum has ended, as a kernel may still write to it.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from everstep.quorum.errors import SumsBroken
from everstep.quorum.process_group import RankColumn
from everstep.quorum.streams import Event, Streams
from everstep.step import exact
from everstep.step.private import local

LARGEST = 1e10
"""Of an element of a sum, as ATTNChecker (arXiv 2410.11720) has it for near-INF. The squares of 10^12 such elements
have a sum in float32, also if the step has few valid tokens and they are scaled by 1,000: their norm is finite."""

BUCKET_BYTES = 32 << 20
"""Of the pieces in which gradients are summed across groups while the last backward still runs."""

LARGEST_PART = LARGEST / 1000
"""Of an element of one group's part: a sum over up to 1,000 groups that is beyond LARGEST has a part beyond this."""


Seen = Callable[[torch.Tensor, torch.Tensor], None]
"""What is told of a slot's gradients: a parameter, and this rank's part of its gradient."""


class _Memory:
    """Flat memory, with a piece for each of some parameters of one dtype and device; zero.

    Args:
        params: see above.
        dtype: of the memory.
    """

    def __init__(self, params: list[torch.Tensor], dtype: torch.dtype) -> None:
        first, sizes = local(params[0]), [local(p).numel() for p in params]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
        self.views = [piece.view(local(p).shape) for piece, p in zip(self.flat.split(sizes), params, strict=True)]


class _Bucket:
    """The gradients of some parameters of one dtype and device.

    Args:
        params: see above.
        most: of an element of a slot's gradient, where sums are exact; else None.
        in_place: whether gradients of the next slot are added to zeros in the same memory, where sums are exact.
    """

    def __init__(self, params: list[torch.Tensor], most: float | None, *, in_place: bool) -> None:
        self.params, self._most, self._in_place = params, most, in_place
        self.memory = self._new_memory()
        self.held = None if most is None else self._new_memory()
        """Where sums are exact: of the gradients that were taken, with the offset of `exact`."""
        self._empty = [True] * len(params)
        """Of which of them nothing is added up: what the memory has is of an earlier step."""
        self._waiting: list[list[torch.Tensor]] = [[] for _ in params]
        """Gradients of one slot that are added up together with those of the next one: the sum is read and written half
        as often."""
        first = local(params[0])
        self._extremes = torch.zeros(len(params), 2, dtype=first.dtype, device=first.device)
        """Where sums are exact: the least and the largest element of each gradient that was taken last."""
        self.wrong = torch.zeros((), dtype=torch.float64, device=first.device)
        """Where sums are exact: NaN if a gradient that is held has no place in them, else 0."""
        self.filled = [False] * len(params)
        """Which gradients were taken in this attempt; with exact sums, in the slot in progress."""
        self.additions = [0] * len(params)
        """How often each gradient was added to in the slot in progress."""
        self.most_additions = [0] * len(params)
        """The same of the slot in which it was most often."""
        self.sum: Any = None
        self.filled_on: dict[Hashable, Event | None] = {}
        """The streams it was filled from in this attempt, and where in their work."""

    def begin(self) -> None:
        """An attempt begins. With exact sums all is taken already."""
        self.filled = [self.held is not None] * len(self.params)
        self.filled_on.clear()
        self.sum = None

    def begin_slot(self) -> None:
        """The gradients of a slot come next."""
        self.filled = [False] * len(self.params)
        self.additions = [0] * len(self.params)
        self.filled_on.clear()

    def _new_memory(self) -> _Memory:
        return _Memory(self.params, local(self.params[0]).dtype if self._most is None else torch.float64)

    def fill(self, index: int, see: Seen) -> None:
        """Take what is held of a gradient into the memory that is summed; with exact sums, what a slot made of it into
        what is held."""
        param = self.params[index]
        grad = None if param.grad is None else local(param.grad)
        if self.held is not None:
            if grad is not None:
                self._take(index, grad, see)
        elif grad is None:
            self.memory.views[index].zero_()
        else:
            self.memory.views[index].copy_(grad)
        self.filled[index] = True

    def _take(self, index: int, grad: torch.Tensor, see: Seen) -> None:
        param, waiting = self.params[index], self._waiting[index]
        see(param, grad)
        if grad.numel():
            torch.aminmax(grad, out=self._extremes[index].unbind())
        waiting.append(grad)
        if self._in_place or len(waiting) > 1:
            self._add_up(index)
        if self._in_place:
            grad.zero_()
        else:
            param.grad = None

    def _add_up(self, index: int) -> None:
        assert self.held is not None
        exact.add(self.held.views[index], *self._waiting[index], first=self._empty[index])
        self._empty[index] = False
        self._waiting[index].clear()

    def judge(self, *, partly: bool = False) -> None:
        """All gradients of a slot were taken. If one has no place in an exact sum, or is there `partly`, a sum becomes
        NaN."""
        if self._most is not None:
            self.wrong.add_(torch.nan if partly else exact.nan_beyond(self._most, self._extremes))

    def complete(self) -> None:
        """All gradients were taken: the memory that is summed is."""
        if self.held is None:
            return
        self.judge()
        for index, empty in enumerate(self._empty):
            if empty or self._waiting[index]:
                self._add_up(index)
        torch.sub(self.held.flat, exact.OFFSET, out=self.memory.flat)
        self.memory.flat[:1].add_(self.wrong)  # this rank may have no part of these parameters

    def forget(self) -> None:
        """Nothing is held."""
        self._empty = [True] * len(self.params)
        self._waiting = [[] for _ in self.params]
        self._extremes.zero_()
        self.wrong.zero_()

    def give(self, scale: float) -> None:
        """Make the sums, times `scale`, the parameters' gradients."""
        for param, view in zip(self.params, self.memory.views, strict=True):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            torch.mul(view, scale, out=local(param.grad))

    def give_up(self) -> torch.Tensor:
        """Go on in other memory, as a sum may still write to this one."""
        given_up, self.memory = self.memory.flat, self._new_memory()
        return given_up


class GradientReducer:
    """Sums the gradients of one rank's parameters over the groups of a quorum.

    Args:
        params: trainable parameters, DTensor or plain, in the model's order.
        bucket_bytes: size a bucket grows to.
        streams: of the parameters' device.
        hooks: whether backward runs hooks of parameters, and makes new memory for the gradients of each slot. Without
            hooks, all sums start after an attempt's last slot.
        exact_slots: make sums that have the same bits in every order, of up to so many slots; 0: ordinary sums.
        fragments: places of parameters among `params`; in turn each step sums those of one fragment. Empty: each sums
            all.
        see: with exact sums, is called once in a slot for each gradient.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        bucket_bytes: int,
        streams: Streams | None = None,
        *,
        hooks: bool = True,
        exact_slots: int = 0,
        fragments: Sequence[Sequence[int]] = (),
        see: Seen = lambda param, grad: None,
    ) -> None:
        self._streams = streams or Streams()
        self._is_exact, self._see = exact_slots > 0, see
        most = exact.most_of_slot(exact_slots) if self._is_exact else None
        every: list[torch.Tensor] = list(params)
        parts = [[every[at] for at in places] for places in fragments] or [every]
        as_sums = torch.float64 if self._is_exact else None
        self._fragments = [
            [_Bucket(part, most, in_place=not hooks) for part in _split(some, bucket_bytes, as_sums)] for some in parts
        ]
        self._now = 0
        """Which of them is summed."""
        self._given_up: list[tuple[Any, torch.Tensor]] = []
        self._began_on: Hashable = None
        self._began: Event | None = None
        self._sums: RankColumn | None = None
        self._timeout = timedelta(0)
        self._started = 0
        self._armed = self._counted = self._last = False
        self._error: SumsBroken | None = None
        for bucket in (bucket for buckets in self._fragments for bucket in buckets if hooks):
            for index, param in enumerate(bucket.params):
                # FSDP2 runs these hooks itself once the sharded gradient is accumulated.
                param.register_post_accumulate_grad_hook(partial(self._on_grad, bucket, index))

    @property
    def _buckets(self) -> list[_Bucket]:
        return self._fragments[self._now]

    def begin(self, sums: RankColumn, timeout: timedelta, step: int = 0) -> None:
        """Start an attempt at `step` over the groups of `sums`, whose sums may each take `timeout`."""
        self._sums, self._started, self._armed, self._error = sums, 0, False, None
        self._now = (step - 1) % len(self._fragments)
        self._timeout = timeout
        self._began_on, self._began = self._streams.current(), self._streams.record()
        self._given_up = [(one, memory) for one, memory in self._given_up if not one.ended]
        for bucket in self._buckets:
            bucket.begin()

    def begin_slot(self, *, last: bool) -> None:
        """The gradients of a slot come next. They are taken as soon as they are there, if an earlier slot has told how
        often each is added to: with exact sums in each slot, else in an attempt's `last`. There each bucket's sum
        starts once its gradients are."""
        self._last = last
        self._armed = self._counted and (last or self._is_exact)
        for bucket in self._buckets:
            bucket.begin_slot()
        self._began_on, self._began = self._streams.current(), self._streams.record()

    def begin_audit(self) -> None:
        """The gradients that come next are nobody's: nothing is taken."""
        self._last = self._armed = False

    def start(self) -> None:
        """The attempt's gradients are all there, though its last slot is not done: begin to sum them. Does nothing in
        an earlier slot."""
        if self._last:
            self._start_rest()

    def end_slot(self) -> None:
        """All gradients of the slot are there."""
        for bucket in self._buckets:
            early = any(
                filled and now > before
                for filled, now, before in zip(bucket.filled, bucket.additions, bucket.most_additions, strict=True)
            )
            bucket.most_additions = list(map(max, bucket.additions, bucket.most_additions))
            if self._is_exact:
                self._fill_rest(bucket)
                self._wait_for_fills(bucket)
                bucket.judge(partly=self._armed and early)
            if self._armed and early:
                self._error = self._error or SumsBroken("a gradient was added to more often than in earlier slots")
        self._counted, self._armed = True, False

    def forget(self) -> None:
        """Forget what was taken from `param.grad` when slots ended; what is there still is the trainer's."""
        for bucket in self._buckets:
            bucket.forget()

    def finish(self) -> None:
        """Sum what is not summed yet and wait for all of it. Raises SumsBroken."""
        assert self._sums is not None, "begin() comes first"
        self._start_rest()
        error = self._error
        for bucket in self._buckets:
            if bucket.sum is not None and error is None:
                try:
                    self._sums.finish(bucket.sum)
                except SumsBroken as raised:
                    error = raised
        if error is not None:
            for bucket in self._buckets:
                if bucket.sum is not None and not bucket.sum.ended:
                    self._given_up.append((bucket.sum, bucket.give_up()))
            raise error

    def finite(self) -> bool:
        """Whether the finished sums are: no NaN, INF, and nothing whose norm may overflow. A host synchronisation."""
        most = exact.MOST if self._is_exact else LARGEST
        return all_within(most, (bucket.memory.flat for bucket in self._buckets))

    def own_finite(self) -> bool:
        """Whether this group's own part is, by so much that sums of such parts are `finite`. A host synchronisation."""
        if self._is_exact:
            return all_within(0.0, (bucket.wrong for bucket in self._buckets))
        own = (local(p.grad) for bucket in self._buckets for p in bucket.params if p.grad is not None)
        return all_within(LARGEST_PART, own)

    @property
    def nbytes(self) -> int:
        """Of the sums."""
        return sum(bucket.memory.flat.nbytes for bucket in self._buckets)

    def stash(self) -> tuple[int, list[torch.Tensor]]:
        """A copy of the finished sums, in host memory, and which fragment they are of."""
        return self._now, [bucket.memory.flat.to("cpu", copy=True) for bucket in self._buckets]

    def unstash(self, stashed: tuple[int, list[torch.Tensor]]) -> None:
        """Make a copy the finished sums again."""
        self._now, sums = stashed
        with torch.no_grad():
            for bucket, flat in zip(self._buckets, sums, strict=True):
                bucket.memory.flat.copy_(flat)

    def assign(self, scale: float) -> None:
        """Make the sums, times `scale`, the parameters' gradients. Only after `finish`."""
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.give(scale)

    def _on_grad(self, bucket: _Bucket, index: int, param: torch.Tensor) -> None:
        bucket.additions[index] += 1
        if self._armed and bucket.additions[index] == bucket.most_additions[index]:
            self._fill(bucket, index)
            self._start_ready()

    def _fill(self, bucket: _Bucket, index: int) -> None:
        """Take a gradient into its bucket, on the current stream: not before what the attempt's own stream did with
        the bucket's memory before the attempt."""
        stream = self._streams.current()
        if stream != self._began_on and stream not in bucket.filled_on:
            self._streams.wait(self._began)
        with torch.no_grad():
            bucket.fill(index, self._see)
        bucket.filled_on[stream] = self._streams.record()

    def _fill_rest(self, bucket: _Bucket) -> None:
        for index, filled in enumerate(bucket.filled):
            if not filled:
                self._fill(bucket, index)

    def _start_rest(self) -> None:
        """Fill what is not filled yet, and start every sum that has not started."""
        self._last = True
        for bucket in self._buckets:
            self._fill_rest(bucket)
        self._start_ready()

    def _start_ready(self) -> None:
        assert self._sums is not None
        while self._last and self._started < len(self._buckets) and self._error is None:
            bucket = self._buckets[self._started]
            if not all(bucket.filled):
                return
            self._wait_for_fills(bucket)
            bucket.complete()
            try:
                bucket.sum = self._sums.start(bucket.memory.flat, self._timeout)
            except SumsBroken as error:
                # Backward goes on: what it computes is held for the next attempt.
                self._error = error
            self._started += 1

    def _wait_for_fills(self, bucket: _Bucket) -> None:
        """What the current stream does next comes after all that filled the bucket."""
        current = self._streams.current()
        for stream, filled in bucket.filled_on.items():
            if stream != current:
                self._streams.wait(filled)


def all_within(most: float, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no element is larger, nor NaN, with one host synchronisation for all of one device."""
    found: dict[torch.device, torch.Tensor] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        # NaN is the least and the most of whatever it is among; to look at each number takes ten times as long.
        within = (torch.stack(torch.aminmax(tensor)).abs() <= most).all()
        found[tensor.device] = found[tensor.device] & within if tensor.device in found else within
    return all(bool(flag) for flag in found.values())


def _split(params: list[torch.Tensor], bucket_bytes: int, dtype: torch.dtype | None) -> list[list[torch.Tensor]]:
    """Parameters in backward order, cut where a bucket is full or the dtype or device changes. `dtype`: of the sums, if
    it is not that of the parameters."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for param in reversed(params):
        part = local(param)
        nbytes = part.numel() * (dtype or part.dtype).itemsize
        alike = buckets and (local(buckets[-1][0]).dtype, local(buckets[-1][0]).device) == (part.dtype, part.device)
        if not alike or (size and size + nbytes > bucket_bytes):
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += nbytes
    return buckets
