"""Gradient sums over groups, begun while the last backward still runs.

The sums are taken over copies, so that `param.grad` keeps this group's own part for a retry. Parameters are laid
into flat buckets in the order in which backward reaches them, last layer first; the sum of a bucket starts when the
last of its gradients is there and every bucket before it has started, so all groups start them in the same order,
those that compute nothing in this attempt as well.

A gradient may be added to several times in one slot: a loss in chunks runs the output layer's backward once a chunk.
How often is counted in each slot, and a gradient is taken to be there when it was added to as often as before.

A slot that may be refused is computed apart: its backward begins with no gradients, and what it makes is taken from it
piece by piece and added to the slots before, into memory of its own. Once it has ended that is what waits for the next
slot; after one that was refused it is what waited before. Where backward runs hooks, the additions are those of a slot
that is not computed apart, in the same order; else what a slot made is added when it has ended.

On a device the hooks run on whatever stream the gradient was accumulated on (FSDP2 has one for its reduce-scatters), so
a bucket may be filled from several: its sum begins after all of them. The memory of a sum that was given up is kept
until the sum has ended, as a kernel may still write to it.
"""

from collections.abc import Hashable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from everstep.step.interfaces import SumsBroken
from everstep.step.streams import Event, HostStreams, Streams


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():  # to enter no_grad takes longer than all the rest
        return tensor.to_local()
    with torch.no_grad():  # else it is a view that autograd follows
        return tensor.to_local()


class Sum(Protocol):
    """One sum under way, such as `everstep.quorum.in_flight.Sum`."""

    @property
    def ended(self) -> bool:
        """Whether nothing reads or writes its tensor on its behalf any more, be it complete or not."""
        ...


class AsyncSums(Protocol):
    """What sums gradients in place over the groups, such as `everstep.quorum.process_group.RankColumn`."""

    def start(self, tensor: torch.Tensor, timeout: timedelta) -> Any:
        """A `Sum`, of what is in `tensor` once the current stream has done what it was given so far. Raises
        SumsBroken."""

    def finish(self, one: Any) -> None:
        """Wait for a `Sum`. Raises SumsBroken."""


class _Memory:
    """Flat memory, with a piece for each of some parameters of one dtype and device."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        first, sizes = local(params[0]), [local(p).numel() for p in params]
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [_laid_out_as(local(p), piece) for piece, p in zip(self.flat.split(sizes), params, strict=True)]
        self._gradients: dict[Hashable, torch.Tensor] = {}

    def gradient(self, index: int, param: torch.Tensor, layout: Any) -> torch.Tensor:
        """A piece as its parameter's gradient, laid out over the group's ranks like this: mesh and placements."""
        if not isinstance(param, DTensor):
            return self.views[index]
        if (index, *layout) not in self._gradients:
            self._gradients[index, *layout] = DTensor.from_local(
                self.views[index], *layout, run_check=False, shape=param.shape, stride=param.stride()
            )
        return self._gradients[index, *layout]


class _Bucket:
    """The gradients of some parameters of one dtype and device.

    Args:
        swaps: whether what slots apart add up has two memories, which swap when one has ended.
    """

    def __init__(self, params: list[torch.Tensor], swaps: bool) -> None:
        self.params, self.swaps = params, swaps
        self.memory = _Memory(params)
        """For the sum, and before it for what the slot in progress adds up if it is computed apart."""
        self.waiting: _Memory | None = None
        """For what the slots before it added up."""
        self.waits = [False] * len(params)
        """Whether there is something in it, of each parameter."""
        self.taken = [False] * len(params)
        """Whether the slot in progress, computed apart, has given a gradient."""
        self.layouts = [(p.device_mesh, p.placements) if isinstance(p, DTensor) else () for p in params]
        """How the last gradients were laid out over the group's ranks."""
        self.filled = [False] * len(params)
        self.additions = [0] * len(params)
        """How often each gradient was added to in the slot in progress."""
        self.usual = [0] * len(params)
        """The same of the slot before."""
        self.sum: Sum | None = None
        self.filled_on: dict[Hashable, Event | None] = {}
        """The streams it was filled from in this attempt, and where in their work."""

    def begin(self) -> None:
        """An attempt begins: what the parameters have is not where it sums."""
        self.filled = [False] * len(self.params)
        self.filled_on.clear()
        self.sum = None
        if self.waiting is not None and self._are_gradients(self.memory):
            self.memory, self.waiting = self.waiting, self.memory

    def _gradient(self, index: int) -> torch.Tensor | None:
        """This rank's part of a gradient, and how it is laid out is noted."""
        grad = self.params[index].grad
        if isinstance(grad, DTensor):
            self.layouts[index] = (grad.device_mesh, grad.placements)
        return None if grad is None else local(grad)

    def fill(self, index: int) -> None:
        grad = self._gradient(index)
        if grad is None:
            self.memory.views[index].zero_()
        else:
            self.memory.views[index].copy_(grad)
        self.filled[index] = True

    def release(self) -> None:
        """Slots are not computed apart for now: do without the second memory, if it is not the parameters'."""
        if self.waiting is not None and not self._are_gradients(self.waiting):
            self.waiting = None

    def _are_gradients(self, memory: _Memory) -> bool:
        pieces = zip(self.params, memory.views, strict=True)
        return any(p.grad is not None and _same_memory(p.grad, view) for p, view in pieces)

    def set_aside(self) -> None:
        """What the parameters have is what waits."""
        if not self.swaps:
            self.waiting = self.memory
        elif self.waiting is None:
            self.waiting = _Memory(self.params)
        for index, view in enumerate(self.waiting.views):
            grad = self._gradient(index)
            self.waits[index] = grad is not None
            if grad is not None and not _same_memory(grad, view):
                view.copy_(grad)

    def take(self, index: int) -> None:
        """Add a gradient to what waits, or to what the slot has added to that."""
        grad, view = self._gradient(index), self.memory.views[index]
        assert grad is not None
        assert self.waiting is not None, "set_aside() comes first"
        if self.taken[index]:
            view.add_(grad)
        elif self.waits[index]:
            torch.add(self.waiting.views[index], grad, out=view)
        else:
            view.copy_(grad)
        self.taken[index] = True

    def accept(self) -> None:
        """What waited and what the slot added to it is what waits."""
        assert self.waiting is not None, "set_aside() comes first"
        if self.swaps and any(self.taken):
            for index, waits in enumerate(self.waits):
                if waits and not self.taken[index]:
                    self.memory.views[index].copy_(self.waiting.views[index])
            self.memory, self.waiting = self.waiting, self.memory
        self.waits = [waits or taken for waits, taken in zip(self.waits, self.taken, strict=True)]

    def give(self, index: int, memory: _Memory) -> None:
        """Make a piece of memory the parameter's gradient: itself, where slots are computed apart and backward adds
        nothing to it."""
        param = self.params[index]
        if self.swaps and self.waiting is not None:
            param.grad = memory.gradient(index, param, self.layouts[index])
            return
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        local(param.grad).copy_(memory.views[index])


class GradientReducer:
    """Sums the gradients of one rank's parameters over the groups of a quorum.

    Args:
        params: trainable parameters, DTensor or plain, in the model's order.
        bucket_bytes: size a bucket grows to.
        streams: of the parameters' device.
        hooks: whether backward runs hooks of parameters. Without, all sums start after an attempt's last slot.
        fixed: whether gradients keep their memory, as those that a CUDA graph adds to.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        bucket_bytes: int,
        streams: Streams | None = None,
        *,
        hooks: bool = True,
        fixed: bool = False,
    ) -> None:
        self._fixed = fixed
        self._streams = streams or HostStreams()
        swaps = hooks and not fixed
        self._buckets = [_Bucket(part, swaps) for part in _split(list(params), bucket_bytes)]
        self._given_up: list[tuple[Sum, torch.Tensor]] = []
        self._began_on: Hashable = None
        self._began: Event | None = None
        self._sums: AsyncSums | None = None
        self._timeout = timedelta(0)
        self._started = 0
        self._armed = self._counted = self._last = self._apart = False
        self._slot_began: Event | None = None
        self._taken_on: dict[Hashable, Event | None] = {}
        """The streams on which the slot in progress, computed apart, gave gradients, and where in their work."""
        self._error: SumsBroken | None = None
        for bucket in self._buckets if hooks else ():
            for index, param in enumerate(bucket.params):
                # FSDP2 runs these hooks itself once the sharded gradient is accumulated.
                param.register_post_accumulate_grad_hook(partial(self._on_grad, bucket, index))

    def begin(self, sums: AsyncSums, timeout: timedelta, step: int = 0) -> None:
        """Start an attempt at `step` over the groups of `sums`, whose sums may each take `timeout`."""
        self._sums, self._started, self._armed, self._error = sums, 0, False, None
        self._last = False
        self._timeout = timeout
        self._began_on, self._began = self._streams.current(), self._streams.record()
        self._given_up = [(one, memory) for one, memory in self._given_up if not one.ended]
        for bucket in self._buckets:
            bucket.begin()

    def begin_slot(self, *, last: bool, apart: bool = False) -> None:
        """The gradients of a slot come next. In an attempt's last slot each bucket's sum starts as soon as its
        gradients are there, if an earlier slot has told how often each is added to.

        `apart`: they count only if `end_slot` follows, and are the parameters' together with those of all slots before
        once one follows that is not apart, or after `end_slots`. No sum starts sooner."""
        if apart:
            self._set_aside()
        else:
            self.end_slots()
            for bucket in self._buckets:
                bucket.release()
        self._last = last and not apart
        self._armed = self._last and self._counted
        for bucket in self._buckets:
            bucket.additions = [0] * len(bucket.params)

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
                for filled, now, before in zip(bucket.filled, bucket.additions, bucket.usual, strict=True)
            )
            if self._armed and early and self._error is None:
                self._error = SumsBroken("a gradient was added to more often than in earlier slots")
            bucket.usual = bucket.additions
        self._counted, self._armed = True, False
        if self._apart:
            self._join_streams()
            with torch.no_grad():
                for bucket in self._buckets:
                    # Those without a hook, and what was put there otherwise.
                    for index, param in enumerate(bucket.params):
                        if param.grad is not None:
                            self._take(bucket, index)
                    bucket.accept()

    def end_slots(self) -> None:
        """No slot follows that is computed apart, in this attempt or for now: the gradients are those of all that
        ended."""
        if not self._apart:
            return
        self._apart = False
        self._join_streams()
        with torch.no_grad():
            for bucket in self._buckets:
                assert bucket.waiting is not None
                for index, param in enumerate(bucket.params):
                    if bucket.waits[index]:
                        bucket.give(index, bucket.waiting)
                    else:
                        self._clear(param)

    def _set_aside(self) -> None:
        """Leave the parameters without gradients. What they have is what waits; unless something does already, which
        leaves a slot that was refused, or one that has been added."""
        self._join_streams()
        with torch.no_grad():
            for bucket in self._buckets:
                if not self._apart:
                    bucket.set_aside()
                bucket.taken = [False] * len(bucket.params)
                for param in bucket.params:
                    self._clear(param)
        self._apart, self._slot_began = True, self._streams.record()

    def _take(self, bucket: _Bucket, index: int) -> None:
        """Take a gradient that a slot apart has made, on the current stream."""
        stream, param = self._streams.current(), bucket.params[index]
        if stream not in self._taken_on:
            self._streams.wait(self._slot_began)
        assert param.grad is not None
        self._streams.keep(local(param.grad))
        bucket.take(index)
        self._clear(param)
        self._taken_on[stream] = self._streams.record()

    def _join_streams(self) -> None:
        """What the current stream is given from now on begins after what slots apart gave others."""
        current = self._streams.current()
        for stream, taken in self._taken_on.items():
            if stream != current:
                self._streams.wait(taken)
        self._taken_on.clear()

    def _clear(self, param: torch.Tensor) -> None:
        if self._fixed and param.grad is not None:
            param.grad.zero_()
        else:
            param.grad = None

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
                    self._given_up.append((bucket.sum, bucket.memory.flat))
                    bucket.memory = _Memory(bucket.params)
            raise error

    def finite(self) -> bool:
        """Whether the sums are: no INF, no NaN. A host synchronisation."""
        return all_finite(bucket.memory.flat for bucket in self._buckets)

    def own_finite(self) -> bool:
        """Whether this group's own part of the sums is."""
        return all_finite(local(p.grad) for bucket in self._buckets for p in bucket.params if p.grad is not None)

    def stash(self) -> list[torch.Tensor]:
        """A copy of the finished sums, in host memory."""
        return [bucket.memory.flat.to("cpu", copy=True) for bucket in self._buckets]

    def unstash(self, stashed: list[torch.Tensor]) -> None:
        """Make a copy the finished sums again."""
        with torch.no_grad():
            for bucket, flat in zip(self._buckets, stashed, strict=True):
                bucket.memory.flat.copy_(flat)

    def assign(self, scale: float) -> None:
        """Make the sums, times `scale`, the parameters' gradients. Only after `finish`."""
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.memory.flat.mul_(scale)
                for index in range(len(bucket.params)):
                    bucket.give(index, bucket.memory)

    def _on_grad(self, bucket: _Bucket, index: int, param: torch.Tensor) -> None:
        bucket.additions[index] += 1
        if self._apart and bucket.swaps:
            with torch.no_grad():
                self._take(bucket, index)
        if self._armed and bucket.additions[index] == bucket.usual[index]:
            with torch.no_grad():
                self._fill(bucket, index)
            self._start_ready()

    def _fill(self, bucket: _Bucket, index: int) -> None:
        """Take a gradient into its bucket, on the current stream: not before what the attempt's own stream did with
        the bucket's memory before the attempt."""
        stream = self._streams.current()
        if stream != self._began_on and stream not in bucket.filled_on:
            self._streams.wait(self._began)
        bucket.fill(index)
        bucket.filled_on[stream] = self._streams.record()

    def _start_rest(self) -> None:
        """Fill what is not filled yet, and start every sum that has not started."""
        for bucket in self._buckets:
            for index, filled in enumerate(bucket.filled):
                if not filled:
                    self._fill(bucket, index)
        self._start_ready()

    def _start_ready(self) -> None:
        assert self._sums is not None
        while self._started < len(self._buckets) and self._error is None:
            bucket = self._buckets[self._started]
            if not all(bucket.filled):
                return
            current = self._streams.current()
            for stream, filled in bucket.filled_on.items():
                if stream != current:
                    self._streams.wait(filled)
            try:
                bucket.sum = self._sums.start(bucket.memory.flat, self._timeout)
            except SumsBroken as error:
                # Backward goes on: what it computes is held for the next attempt.
                self._error = error
            self._started += 1


def _laid_out_as(param: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """A piece in the order in which the parameter lies in memory: fused optimizers go through both side by side."""
    return piece.as_strided(param.shape, torch.empty_like(param, device="meta").stride())


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return other.numel() > 0 and local(one).data_ptr() == other.data_ptr()


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all are, with one host synchronisation for all of one device."""
    found: dict[torch.device, torch.Tensor] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        # NaN is the least and the most of whatever it is among; to look at each number takes ten times as long.
        finite = torch.stack(torch.aminmax(tensor)).isfinite().all()
        found[tensor.device] = found[tensor.device] & finite if tensor.device in found else finite
    return all(bool(flag) for flag in found.values())


def _split(params: list[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    """Parameters in backward order, cut where a bucket is full or the dtype or device changes."""
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for param in reversed(params):
        part = local(param)
        nbytes = part.numel() * part.element_size()
        alike = buckets and (local(buckets[-1][0]).dtype, local(buckets[-1][0]).device) == (part.dtype, part.device)
        if not alike or (size and size + nbytes > bucket_bytes):
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += nbytes
    return buckets
