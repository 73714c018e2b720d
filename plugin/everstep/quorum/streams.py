"""Streams and events of a device, which order the work of sums, heals and snapshots. On a CPU they do nothing."""

import contextlib
import logging
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Protocol

import torch

log = logging.getLogger("everstep.streams")


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before this point has ended."""


class Streams:
    """The streams (queues of work) of one device. A thread's calls enqueue work on its current stream. This class is
    for a CPU, which has no streams: a call returns when its work is done."""

    def current(self) -> Hashable:
        """Return the calling thread's current stream."""
        return None

    def record(self) -> Event | None:
        """Return the point after all work that is on the current stream so far; None on a CPU."""
        return None

    def wait(self, event: Any) -> None:
        """Let the work that the current stream gets from now on begin after `event`. Does not block the thread."""

    def of_sums(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the separate stream for sums (or copies) is the current one."""
        return contextlib.nullcontext()


class DeviceStreams(Streams):
    """Streams of the accelerator `device`, with a new one for sums. Tested only on the stand-in of tests/device."""

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


def copy_to_host(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]], streams: Streams, ready: Event | None) -> None:
    """Copy each (source, target) to the host, on the separate stream. Returns when all copies are complete.

    Args:
        ready: point in the compute stream after which the copies may begin.
    """
    with streams.of_sums():
        streams.wait(ready)
        for source, target in pieces:
            target.copy_(source, non_blocking=True)
        done = streams.record()
    if done is not None:
        done.synchronize()


def page_locked(size: int) -> torch.Tensor:
    """Return zeros, uint8 [size], in page-locked memory, to which an accelerator copies faster; in ordinary memory if
    the driver gives none of that."""
    try:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning("copies from the device are slower, as page-locked memory cannot be had: %s", error)
        return torch.zeros(size, dtype=torch.uint8)


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return Streams() if device.type == "cpu" else DeviceStreams(device)
