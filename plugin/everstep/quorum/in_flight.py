"""A communicator, the sums that are under way on it, and the thread that waits for them.

Some of torch's work objects tell when they are complete, some only return from `wait`, and one of a sum with a dead
peer may do neither. So a separate thread waits for the work objects of a communicator, in the order in which their sums
began. A caller that needs a sum waits for that thread, for the sum's timeout plus `LATE_S`, and not at all once the
process group is broken. The thread of a broken process group goes on in the background until its sums have ended.

A sum on a device runs on the stream for sums, and an event after it tells when its kernel has ended, complete or
aborted. Only this thread waits for the event, so the thread that begins sums never waits for the device.
"""

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch

from everstep.quorum.communicator import Communicator
from everstep.quorum.errors import SumsBroken
from everstep.quorum.streams import Event, Streams

LATE_S = 0.5
"""Seconds after a sum's timeout, at which the backend fails the sum itself, until it is given up here."""


class Sum:
    """One sum that is under way. `ended`: whether it is over, so that nothing accesses its tensor for it any more."""

    def __init__(self, queue: "SumQueue", work: Any, event: Event | None, timeout: timedelta) -> None:
        self.queue, self.work, self.event = queue, work, event
        self.began, self.timeout_s = time.monotonic(), timeout.total_seconds()
        self.ended = False
        self.error = ""


class SumQueue:
    """The sums of one communicator, in order. `streams`: streams of the device that the sums run on."""

    def __init__(self, communicator: Communicator, streams: Streams) -> None:
        self.communicator, self._streams = communicator, streams
        self._changed = threading.Condition()
        self._queue: deque[Sum] = deque()
        self._thread: threading.Thread | None = None
        self._last_ended = 0.0
        self._broken = False
        self._pending = 0
        """Number of sums that have not ended."""

    def start(self, tensor: torch.Tensor, timeout: timedelta) -> Sum:
        """Begin to sum in place, after the work that is on the current stream so far. Raises the backend's errors."""
        ready, on_device = self._streams.record(), self.communicator.on_device
        # NCCL counts the timeout from here on, but first has to carry out all pending sums.
        backend_timeout = timeout * (1 + self._pending) if on_device else timeout
        with self._streams.of_sums():
            self._streams.wait(ready)
            work = self.communicator.allreduce(tensor, backend_timeout)
            one = Sum(self, work, self._streams.record() if on_device else None, timeout)
        with self._changed:
            self._pending += 1
            self._queue.append(one)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait_for_all, name="sums", daemon=True)
                self._thread.start()
        return one

    def finish(self, one: Sum) -> None:
        """Return when the sum is complete.

        Raises:
            SumsBroken: the sum failed or took too long, or the process group was broken meanwhile.
        """
        with self._changed:
            while not one.ended and not self._broken:
                # A sum starts only when the one before it has ended, so its timeout counts from then.
                left_s = max(one.began, self._last_ended) + one.timeout_s + LATE_S - time.monotonic()
                if left_s <= 0:
                    raise SumsBroken(f"a sum did not complete within {one.timeout_s:g} s")
                self._changed.wait(left_s)
            if self._broken:
                raise SumsBroken("a member of the quorum was lost")
        if one.error:
            raise SumsBroken(one.error)

    def warm(self, timeout: timedelta) -> None:
        """Make a first sum, of a zero. The call that begins it blocks until all members have connected, and loads the
        device's kernels. Raises SumsBroken, or the backend's errors."""
        device = torch.accelerator.current_accelerator(check_available=True)
        self.finish(self.start(torch.zeros(1, device=device), timeout))

    def end(self) -> None:
        """Break the process group: every wait for one of its sums fails."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self.communicator.abort()  # last, so that a sum which the abort ends does not look complete

    def _wait_for_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._broken)
                if not self._queue:
                    self._thread = None  # a sum that begins just now starts another thread
                    return
                one = self._queue.popleft()
            error = self._wait_for(one)
            with self._changed:
                one.error, one.work = error, None
                one.ended, self._last_ended = True, time.monotonic()
                self._pending -= 1
                self._changed.notify_all()

    def _wait_for(self, one: Sum) -> str:
        """Wait until the sum has ended; return why it failed, empty if it did not."""
        error = ""
        try:
            with self._streams.of_sums():
                if one.work is not None:
                    one.work.wait()
                if one.event is None:
                    one.event = self._streams.record()
        except Exception as raised:  # noqa: BLE001 - backends raise many types
            error = first_line(raised)
        try:
            if one.event is not None:
                one.event.synchronize()  # a sum that raised may still run on the device
            error = error or self.communicator.error()
        except Exception as raised:  # noqa: BLE001 - raised by a lost device
            error = error or first_line(raised)
        return error


def first_line(error: Exception) -> str:
    """Return an exception's type and first line, short enough for an event."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
