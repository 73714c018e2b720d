"""The order of work on a device, for sums, heals and snapshots; on a CPU everything is in order already."""

import contextlib
import logging
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Protocol

import torch

log = logging.getLogger("everstep.streams")

WITH_ATTENTION_KERNELS = ("cuda", "xpu")
"""Types of the devices that PyTorch's kernels of FlexAttention and varlen attention train on."""


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before this point has ended."""


class Streams:
    """Queues of work on one device. A thread has a current one, which what it calls goes to. These are a CPU's: a call
    returns when its work is done."""

    def current(self) -> Hashable:
        """The calling thread's current stream."""
        return None

    def record(self) -> Event | None:
        """The point after all that the current stream was given so far; None where work is done when a call returns."""
        return None

    def wait(self, event: Any) -> None:
        """What the current stream is given from now on begins after `event`. Does not block the calling thread."""

    def of_sums(self) -> contextlib.AbstractContextManager[object]:
        """Makes the stream of the sums the current one."""
        return contextlib.nullcontext()


class DeviceStreams(Streams):
    """Of an accelerator, with a stream of its own for sums. Tested on the stand-in of tests/device, not on a GPU.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._sums = device, torch.Stream(device=device)

    def current(self) -> Hashable:
        return torch.accelerator.current_stream(self._device).stream_id

    def record(self) -> torch.Event:
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def wait(self, event: Any) -> None:
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    @contextlib.contextmanager
    def of_sums(self) -> Iterator[None]:
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._sums)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def bring(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]], streams: Streams, ready: Event | None) -> None:
    """Copy each (source, target) to the host, on a stream of its own; returns when all are there.

    Args:
        ready: what the copies must come after; recorded on the compute stream.
    """
    with streams.of_sums():
        streams.wait(ready)
        for source, target in pieces:
            target.copy_(source, non_blocking=True)
        done = streams.record()
    if done is not None:
        done.synchronize()


def page_locked(size: int) -> torch.Tensor:
    """Zeros, uint8 [size], to which an accelerator copies by itself if its driver gives such memory; to any other the
    copies take longer."""
    try:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning("copies go through memory that is not page-locked: %s", error)
        return torch.zeros(size, dtype=torch.uint8)


def streams_of(device: torch.device) -> Streams:
    """Those of a device."""
    return Streams() if device.type == "cpu" else DeviceStreams(device)
