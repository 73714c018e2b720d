"""Gradient sums over groups, begun while the last backward still runs.

The sums are taken over copies, so that `param.grad` keeps this group's own part for a retry. Parameters are laid
into flat buckets in the order in which backward reaches them, last layer first; the sum of a bucket starts when the
last of its gradients is there and every bucket before it has started, so all groups start them in the same order,
those that compute nothing in this attempt as well.

A gradient may be added to several times in one slot: a loss in chunks runs the output layer's backward once a chunk.
How often is counted in each slot, and a gradient is taken to be there when it was added to as often as before.
"""

from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
from torch.distributed.distributed_c10d import Work
from torch.distributed.tensor import DTensor

from everstep.step.interfaces import SumsBroken


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class AsyncSums(Protocol):
    """What sums gradients in place over the groups, such as `everstep.quorum.process_group.RankColumn`."""

    def start(self, tensor: torch.Tensor, timeout: timedelta) -> Work:
        """Raises SumsBroken."""
        ...

    def finish(self, work: Work) -> None:
        """Raises SumsBroken."""


class _Bucket:
    """Flat memory for the gradients of some parameters of one dtype and device."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.allocate()
        self.filled = [False] * len(params)
        self.additions = [0] * len(params)
        """How often each gradient was added to in the slot in progress."""
        self.usual = [0] * len(params)
        """The same of the slot before."""
        self.work: Work | None = None

    def allocate(self) -> None:
        first, sizes = local(self.params[0]), [local(p).numel() for p in self.params]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [piece.view_as(local(p)) for piece, p in zip(self.flat.split(sizes), self.params, strict=True)]

    def fill(self, index: int) -> None:
        grad = self.params[index].grad
        if grad is None:
            self.views[index].zero_()
        else:
            self.views[index].copy_(local(grad))
        self.filled[index] = True


class GradientReducer:
    """Sums the gradients of one rank's parameters over the groups of a quorum.

    Args:
        params: trainable parameters, DTensor or plain, in the model's order.
        bucket_bytes: size a bucket grows to.
        hooks: whether backward runs hooks of parameters. Without, all sums start after an attempt's last slot.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], bucket_bytes: int, *, hooks: bool = True) -> None:
        self._buckets = [_Bucket(part) for part in _split(list(params), bucket_bytes)]
        self._sums: AsyncSums | None = None
        self._timeout = timedelta(0)
        self._started = 0
        self._armed = self._counted = False
        self._error: SumsBroken | None = None
        for bucket in self._buckets if hooks else ():
            for index, param in enumerate(bucket.params):
                # FSDP2 runs these hooks itself once the sharded gradient is accumulated.
                param.register_post_accumulate_grad_hook(partial(self._on_grad, bucket, index))

    def begin(self, sums: AsyncSums, timeout: timedelta) -> None:
        """Start an attempt over the groups of `sums`, whose sums may each take `timeout`."""
        self._sums, self._started, self._armed, self._error = sums, 0, False, None
        self._timeout = timeout
        for bucket in self._buckets:
            bucket.filled = [False] * len(bucket.params)
            bucket.work = None

    def begin_slot(self, *, last: bool) -> None:
        """The gradients of a slot come next. In an attempt's last slot each bucket's sum starts as soon as its
        gradients are there, if an earlier slot has told how often each is added to."""
        self._armed = last and self._counted
        for bucket in self._buckets:
            bucket.additions = [0] * len(bucket.params)

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

    def keep(self) -> None:
        """Remember the gradients as they are, in the buckets' memory; only while no sum has started."""
        with torch.no_grad():
            for bucket in self._buckets:
                for index in range(len(bucket.params)):
                    bucket.fill(index)
                bucket.filled = [False] * len(bucket.params)

    def take_back(self) -> None:
        """Make the gradients what they were at the last `keep`."""
        with torch.no_grad():
            for bucket in self._buckets:
                for param, view in zip(bucket.params, bucket.views, strict=True):
                    if param.grad is not None:
                        local(param.grad).copy_(view)

    def finish(self) -> None:
        """Sum what is not summed yet and wait for all of it. Raises SumsBroken."""
        assert self._sums is not None, "begin() comes first"
        for bucket in self._buckets:
            for index, filled in enumerate(bucket.filled):
                if not filled:
                    bucket.fill(index)
        self._start_ready()
        error = self._error
        for bucket in self._buckets:
            if bucket.work is not None and error is None:
                try:
                    self._sums.finish(bucket.work)
                except SumsBroken as raised:
                    error = raised
        if error is not None:
            for bucket in self._buckets:
                # A sum that was given up may still write to its memory.
                if bucket.work is not None:
                    bucket.allocate()
            raise error

    def finite(self) -> bool:
        """Whether the sums are: no INF, no NaN. A host synchronisation."""
        return all(bool(bucket.flat.isfinite().all()) for bucket in self._buckets)

    def own_finite(self) -> bool:
        """Whether this group's own part of the sums is."""
        grads = (local(p.grad) for bucket in self._buckets for p in bucket.params if p.grad is not None)
        return all(bool(grad.isfinite().all()) for grad in grads)

    def stash(self) -> list[torch.Tensor]:
        """A copy of the finished sums, in host memory."""
        return [bucket.flat.to("cpu", copy=True) for bucket in self._buckets]

    def unstash(self, stashed: list[torch.Tensor]) -> None:
        """Make a copy the finished sums again."""
        with torch.no_grad():
            for bucket, flat in zip(self._buckets, stashed, strict=True):
                bucket.flat.copy_(flat)

    def assign(self, scale: float) -> None:
        """Make the sums, times `scale`, the parameters' gradients. Only after `finish`."""
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.flat.mul_(scale)
                for param, view in zip(bucket.params, bucket.views, strict=True):
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                    local(param.grad).copy_(view)

    def _on_grad(self, bucket: _Bucket, index: int, param: torch.Tensor) -> None:
        bucket.additions[index] += 1
        if self._armed and bucket.additions[index] == bucket.usual[index]:
            with torch.no_grad():
                bucket.fill(index)
            self._start_ready()

    def _start_ready(self) -> None:
        assert self._sums is not None
        while self._started < len(self._buckets) and self._error is None:
            bucket = self._buckets[self._started]
            if not all(bucket.filled):
                return
            try:
                bucket.work = self._sums.start(bucket.flat, self._timeout)
            except SumsBroken as error:
                # Backward goes on: what it computes is held for the next attempt.
                self._error = error
            self._started += 1


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
