"""Gradient sums over groups, started while the last backward still runs.

Copies of the gradients are summed, so that `param.grad` keeps this group's own part for a retry. The copies lie in flat
buckets in the order in which backward reaches the parameters, last layer first. The sum of a bucket starts when all its
gradients are complete and every bucket before it has started. So all groups, also those that compute nothing in this
attempt, start the sums in the same order.

With exact sums (`everstep.step.exact`), the group holds an exact sum instead. In each slot, a gradient is removed from
`param.grad` as soon as it is complete. In every second slot, it is then added to the sum together with the gradient of
the slot before: it is still in the processor's cache, and the memory of both is free for the next ones.

A gradient may be added to several times in one slot: a loss in chunks runs the output layer's backward once per chunk.
So the additions are counted in each slot. A gradient counts as complete when it was added to as often as in any slot
before, or when the slot ends.

On a device, a hook runs on the stream on which its gradient was accumulated (FSDP2 has one for its reduce-scatters), so
a bucket may be filled on several streams. Its sum starts after all of them. The memory of a sum that was given up is
kept until the sum has ended, as a kernel may still write to it.
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
"""Largest absolute value that an element of a sum may have: ATTNChecker's bound of near-INF (arXiv 2410.11720). The
norm of 10^12 such elements is finite in float32, even if a step has few valid tokens and they are scaled by 1,000."""

BUCKET_BYTES = 32 << 20
"""Bytes of gradients that are summed over the groups in one piece."""

LARGEST_PART = LARGEST / 1000
"""The same for one group's part: if a sum over up to 1,000 groups is beyond LARGEST, a part of it is beyond this."""

OnGradient = Callable[[torch.Tensor, torch.Tensor], None]
"""Is called with a parameter and this rank's part of its gradient."""


class _Memory:
    """One flat tensor of zeros on the parameters' device, with a view in the shape of each parameter.

    Args:
        params: parameters of one dtype and device.
        dtype: dtype of the flat tensor.
    """

    def __init__(self, params: list[torch.Tensor], dtype: torch.dtype) -> None:
        first, sizes = local(params[0]), [local(p).numel() for p in params]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
        self.views = [piece.view(local(p).shape) for piece, p in zip(self.flat.split(sizes), params, strict=True)]


class _Bucket:
    """The gradients of some parameters, which are summed in one piece.

    Args:
        params: parameters of one dtype and device.
        most: with exact sums, the largest element that a slot's gradient may have; else None.
        in_place: with exact sums, whether backward adds the next slot's gradients to zeros in the same memory.
    """

    def __init__(self, params: list[torch.Tensor], most: float | None, *, in_place: bool) -> None:
        self.params, self._most, self._in_place = params, most, in_place
        self.memory = self._new_memory()
        self.held = None if most is None else self._new_memory()
        """With exact sums: the sums of the gradients that this group holds, with the offset of `exact`."""
        self._empty = [True] * len(params)
        """By parameter, whether nothing is held: then `held` has values of an earlier step there."""
        self._waiting: list[list[torch.Tensor]] = [[] for _ in params]
        """By parameter, a slot's gradient that is added with the next slot's: this halves the passes over `held`."""
        first = local(params[0])
        self._extremes = torch.zeros(len(params), 2, dtype=first.dtype, device=first.device)
        """With exact sums: the least and the largest element of the last gradient of each parameter."""
        self.wrong = torch.zeros((), dtype=torch.float64, device=first.device)
        """With exact sums: NaN if a gradient that is held is too large for them or incomplete, else 0."""
        self.filled = [False] * len(params)
        """By parameter, whether its gradient was taken in this attempt; with exact sums, in the slot in progress."""
        self.additions = [0] * len(params)
        """By parameter, how often its gradient was added to in the slot in progress."""
        self.most_additions = [0] * len(params)
        """By parameter, the most additions in any slot so far."""
        self.sum: Any = None
        self.filled_on: dict[Hashable, Event | None] = {}
        """Stream that filled the bucket in this attempt or slot → the point in its work after that."""

    def begin(self) -> None:
        """Begin an attempt. With exact sums, every gradient was taken when its slot was computed."""
        self.filled = [self.held is not None] * len(self.params)
        self.filled_on.clear()
        self.sum = None

    def begin_slot(self) -> None:
        """Begin a slot, of which no gradient is there yet."""
        self.filled = [False] * len(self.params)
        self.additions = [0] * len(self.params)
        self.filled_on.clear()

    def _new_memory(self) -> _Memory:
        return _Memory(self.params, local(self.params[0]).dtype if self._most is None else torch.float64)

    def fill(self, index: int, on_gradient: OnGradient) -> None:
        """Copy a gradient to the memory that is summed. With exact sums, move a slot's gradient to what is held."""
        param, waiting = self.params[index], self._waiting[index]
        self.filled[index] = True
        if param.grad is None:
            if self.held is None:
                self.memory.views[index].zero_()
            return
        grad = local(param.grad)
        if self.held is None:
            self.memory.views[index].copy_(grad)
            return
        on_gradient(param, grad)
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
        """Judge a slot whose gradients were all taken: with exact sums, set `wrong` to NaN if one of them is too large.

        Args:
            partly: whether a gradient was taken before it was complete, which sets `wrong` to NaN too.
        """
        if self._most is not None:
            self.wrong.add_(torch.nan if partly else exact.nan_beyond(self._most, self._extremes))

    def complete(self) -> None:
        """With exact sums, write what is held to the memory that is summed, now that all gradients were taken."""
        if self.held is None:
            return
        self.judge()
        for index, empty in enumerate(self._empty):
            if empty or self._waiting[index]:
                self._add_up(index)
        torch.sub(self.held.flat, exact.OFFSET, out=self.memory.flat)
        self.memory.flat[:1].add_(self.wrong)  # a slice, not [0]: on this rank the shards may be empty

    def forget(self) -> None:
        """Forget what is held."""
        self._empty = [True] * len(self.params)
        self._waiting = [[] for _ in self.params]
        self._extremes.zero_()
        self.wrong.zero_()

    def give_up(self) -> torch.Tensor:
        """Replace the memory, to which a sum that was given up may still write, and return it."""
        given_up, self.memory = self.memory.flat, self._new_memory()
        return given_up


class GradientReducer:
    """Sums the gradients of one rank's parameters over the groups of a quorum.

    Args:
        params: trainable parameters, DTensor or plain, in the model's order.
        bucket_bytes: largest size of a bucket, unless a single parameter is larger.
        streams: streams of the parameters' device.
        hooks: whether backward runs hooks of parameters, and makes new memory for the gradients of each slot. Without
            hooks, all sums start after an attempt's last slot.
        exact_slots: slots of a step, for exact sums, which have the same bits in every order; 0 for ordinary sums.
        fragments: parameters of each fragment, as indices into `params`. Each step sums one fragment, in turn. Empty if
            each step sums all parameters.
        on_gradient: with exact sums, called once per slot for each gradient.
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
        on_gradient: OnGradient = lambda param, grad: None,
    ) -> None:
        self._streams = streams or Streams()
        self._is_exact, self._on_gradient = exact_slots > 0, on_gradient
        most = exact.most_of_slot(exact_slots) if self._is_exact else None
        every: list[torch.Tensor] = list(params)
        parts = [[every[at] for at in places] for places in fragments] or [every]
        as_sums = torch.float64 if self._is_exact else None
        self._fragments = [
            [_Bucket(part, most, in_place=not hooks) for part in _split(some, bucket_bytes, as_sums)] for some in parts
        ]
        self._now = 0
        """Index of the fragment that this step sums."""
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
                param.register_post_accumulate_grad_hook(partial(self._on_accumulated, bucket, index))

    @property
    def _buckets(self) -> list[_Bucket]:
        return self._fragments[self._now]

    def begin(self, sums: RankColumn, timeout: timedelta, step: int = 0) -> None:
        """Begin an attempt at `step` over the groups of `sums`. Each sum may take `timeout`."""
        self._sums, self._started, self._armed, self._error = sums, 0, False, None
        self._now = (step - 1) % len(self._fragments)
        self._timeout = timeout
        self._began_on, self._began = self._streams.current(), self._streams.record()
        self._given_up = [(one, memory) for one, memory in self._given_up if not one.ended]
        for bucket in self._buckets:
            bucket.begin()

    def begin_slot(self, *, last: bool) -> None:
        """Begin a slot. Its gradients are taken as soon as they are complete if an earlier slot has shown how often
        each is added to: with exact sums in every slot, else in the `last` one of an attempt. In the last one, each
        bucket's sum starts as soon as all its gradients are taken."""
        self._last = last
        self._armed = self._counted and (last or self._is_exact)
        for bucket in self._buckets:
            bucket.begin_slot()
        self._began_on, self._began = self._streams.current(), self._streams.record()

    def begin_audit(self) -> None:
        """Begin a slot that this group only audits: none of its gradients is taken."""
        self._last = self._armed = False

    def start(self) -> None:
        """In the attempt's last slot, start all sums: its gradients are complete though the slot is not done."""
        if self._last:
            self._start_rest()

    def end_slot(self) -> None:
        """End a slot: all its gradients are complete."""
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
        """Forget the exact sums that are held. What is in `param.grad` is the trainer's to discard."""
        for bucket in self._buckets:
            bucket.forget()

    def finish(self) -> None:
        """Start the sums that have not started, and wait for all of them. Raises SumsBroken."""
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
        """Whether the finished sums are finite: no NaN or INF, and nothing whose norm may overflow. A host
        synchronisation."""
        most = exact.MOST if self._is_exact else LARGEST
        return all_within(most, (bucket.memory.flat for bucket in self._buckets))

    def own_finite(self) -> bool:
        """Whether this group's own part is finite, and small enough that sums of such parts are `finite`. A host
        synchronisation."""
        if self._is_exact:
            return all_within(0.0, (bucket.wrong for bucket in self._buckets))
        own = (local(p.grad) for bucket in self._buckets for p in bucket.params if p.grad is not None)
        return all_within(LARGEST_PART, own)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return sum(bucket.memory.flat.nbytes for bucket in self._buckets)

    def stash(self) -> tuple[int, list[torch.Tensor]]:
        """Return the fragment that was summed, and a copy of its finished sums in host memory."""
        return self._now, [bucket.memory.flat.to("cpu", copy=True) for bucket in self._buckets]

    def unstash(self, stashed: tuple[int, list[torch.Tensor]]) -> None:
        """Restore the finished sums from a copy (`stash`)."""
        self._now, sums = stashed
        with torch.no_grad():
            for bucket, flat in zip(self._buckets, sums, strict=True):
                bucket.memory.flat.copy_(flat)

    @torch.no_grad()
    def assign(self, scale: float) -> None:
        """Set the parameters' gradients to the sums, times `scale`. Only after `finish`."""
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.memory.views, strict=True):
                if param.grad is None:
                    param.grad = torch.empty_like(param)
                torch.mul(view, scale, out=local(param.grad))

    def _on_accumulated(self, bucket: _Bucket, index: int, param: torch.Tensor) -> None:
        bucket.additions[index] += 1
        if self._armed and bucket.additions[index] == bucket.most_additions[index]:
            self._fill(bucket, index)
            self._start_ready()

    def _fill(self, bucket: _Bucket, index: int) -> None:
        """Take a gradient into its bucket, on the current stream, after the work that was on the protocol's stream when
        the slot (before the first slot: the attempt) began, as that may use the bucket's memory."""
        stream = self._streams.current()
        if stream != self._began_on and stream not in bucket.filled_on:
            self._streams.wait(self._began)
        with torch.no_grad():
            bucket.fill(index, self._on_gradient)
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
                # Not raised: backward goes on, and what it computes is held for the next attempt.
                self._error = error
            self._started += 1

    def _wait_for_fills(self, bucket: _Bucket) -> None:
        """Let the current stream wait for the other streams that filled the bucket."""
        current = self._streams.current()
        for stream, filled in bucket.filled_on.items():
            if stream != current:
                self._streams.wait(filled)


def all_within(most: float, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no element has an absolute value above `most` or is NaN. One host synchronisation per device."""
    found: dict[torch.device, torch.Tensor] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        # `aminmax` returns NaN if any element is. To look at each element instead takes ten times as long.
        within = (torch.stack(torch.aminmax(tensor)).abs() <= most).all()
        found[tensor.device] = found[tensor.device] & within if tensor.device in found else within
    return all(bool(flag) for flag in found.values())


def _split(params: list[torch.Tensor], bucket_bytes: int, dtype: torch.dtype | None) -> list[list[torch.Tensor]]:
    """Split parameters, in backward order, where a bucket is full or the dtype or device changes. `dtype`: dtype of the
    sums, if it is not that of the parameters."""
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
