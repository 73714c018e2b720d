"""A communicator, its sums under way, and the thread that waits for them.

Some works say when they are complete, some only return from `wait`, and one that a dead peer was part of may do
neither. So a thread of its own waits for the works of a process group, one after the other in the order in which they
began, and whoever wants a sum waits for that thread: for the sum's timeout and `LATE_S`, and not at all once the
process group is broken. The thread of a broken process group is left behind until its works end.

A sum on a device runs on a stream of the process group's own, and an event behind it tells when its kernel has ended,
complete or aborted. Nobody but this thread waits for the event, so the thread that begins sums never waits for the
device.
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
"""A backend fails a sum at its timeout itself; one that it has not failed so long after is given up here."""


class Sum:
    """One sum under way. `ended`: nothing reads or writes its tensor on its behalf any more."""

    def __init__(self, line: "Line", work: Any, event: Event | None, timeout: timedelta) -> None:
        self.line, self.work, self.event = line, work, event
        self.began, self.timeout_s = time.monotonic(), timeout.total_seconds()
        self.ended = False
        self.error = ""


class Line:
    """The sums of one communicator.

    Args:
        streams: of the device that the sums run on.
    """

    def __init__(self, communicator: Communicator, streams: Streams) -> None:
        self.communicator, self._streams = communicator, streams
        self._changed = threading.Condition()
        self._queue: deque[Sum] = deque()
        self._thread: threading.Thread | None = None
        self._last_ended = 0.0
        self._broken = False
        self._pending = 0
        """Sums that have not ended."""

    def start(self, tensor: torch.Tensor, timeout: timedelta) -> Sum:
        """Begin to sum in place, after what the current stream was given so far. Raises what the backend does."""
        ready, on_device = self._streams.record(), self.communicator.on_device
        # NCCL counts a timeout from here on, and carries out one sum after the other.
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
            SumsBroken: it failed, took too long, or the process group was broken meanwhile.
        """
        with self._changed:
            while not one.ended and not self._broken:
                # A sum begins when the one before it has ended, however early it was enqueued.
                left_s = max(one.began, self._last_ended) + one.timeout_s + LATE_S - time.monotonic()
                if left_s <= 0:
                    raise SumsBroken(f"a sum did not complete within {one.timeout_s:g} s")
                self._changed.wait(left_s)
            if self._broken:
                raise SumsBroken("a member of the quorum was lost")
        if one.error:
            raise SumsBroken(one.error)

    def warm(self, timeout: timedelta) -> None:
        """Carry out a first sum, of nothing: a backend of a device connects its members, and loads its kernels, in the
        call that begins it, which returns when all of them have come. Raises SumsBroken, or what the backend does."""
        device = torch.accelerator.current_accelerator(check_available=True)
        self.finish(self.start(torch.zeros(1, device=device), timeout))

    def end(self) -> None:
        """The process group is broken: nobody waits for its sums any more."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        self.communicator.abort()  # last: a sum that the abort ends is not to look complete

    def _wait_for_all(self) -> None:
        while (one := self._next()) is not None:
            error = self._wait_for(one)
            with self._changed:
                one.error, one.work = error, None
                one.ended, self._last_ended = True, time.monotonic()
                self._pending -= 1
                self._changed.notify_all()

    def _next(self) -> Sum | None:
        """The next sum to wait for. None: the process group is broken, and all that began have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._broken)
            if self._queue:
                return self._queue.popleft()
            self._thread = None  # a sum that is begun at this moment gets another thread
            return None

    def _wait_for(self, one: Sum) -> str:
        """Until the sum has ended; why it failed, or nothing."""
        error = ""
        try:
            with self._streams.of_sums():
                if one.work is not None:
                    one.work.wait()
                if one.event is None:
                    one.event = self._streams.record()
        except Exception as raised:  # noqa: BLE001 - backends raise what they like
            error = first_line(raised)
        try:
            if one.event is not None:
                one.event.synchronize()  # a work that raised may still run on the device
            error = error or self.communicator.error()
        except Exception as raised:  # noqa: BLE001 - a device that is lost says so here
            error = error or first_line(raised)
        return error


def first_line(error: Exception) -> str:
    """What an exception says, short enough for an event."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
