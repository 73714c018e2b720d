"""Keeping the lighthouse of a run up: publish its address once it serves, and restart it when it dies or hangs.

A lighthouse keeps no state. It restarts on the same port, and on another one after a start that did not serve. Groups
read the published address before each request.
Its process beats, because the port and connections of a hung process stay open and do not show that it hangs.
"""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.launch.children import Child, Children
from everstep.launch.machine import free_port
from everstep.launch.restart_rules import backoff_s
from everstep.run.address import address_file, publish_address, published_address
from everstep.run.beats import Beat, BeatFile, lighthouse_beat_path, read_beat
from everstep.run.directory import LaunchError, starts_file
from everstep.run.events import EventLog

ATTEMPTS = 5
"""Number of ports to try, one after the other, as long as no address is published."""
LONGEST_PAUSE_S = 5.0
"""Longest pause in seconds before another start, if several have failed."""
SILENCE_S = 12.0
"""Seconds without a beat after which a lighthouse counts as hung."""


class Lighthouse:
    """The process, address and health of the lighthouse. `keep` is a job of a launcher.

    Args:
        run_dir: the run directory, where the address is published.
        host: the address that it listens on and that groups connect to.
        ft: the run's section.
        children: the launcher's children, which fork it.
        events: the log of its starts and deaths.
    """

    def __init__(self, run_dir: Path, host: str, ft: FaultTolerance, children: Children, events: EventLog) -> None:
        self.published = ""
        """The address that it has published last; "" before the first time."""
        self._run_dir, self._host, self._ft, self._children, self._events = run_dir, host, ft, children, events
        self._beats = lighthouse_beat_path(run_dir)
        self._child: Child | None = None
        self._beat: Beat | None = None
        self._serves = self._hung = False
        self._port = self._failures = 0
        self._started_mono = self._again_mono = 0.0

    @property
    def address(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def superseded(self) -> bool:
        """Whether another lighthouse of the run has published its address after this one."""
        return self.published != "" and published_address(self._run_dir) not in ("", self.published)

    def keep(self) -> None:
        """Start it if it does not run, publish its address once it serves, and kill it if it hangs. Raises LaunchError
        if it cannot be started, and OSError for a shortage."""
        if self._child is not None and not self._child.alive:
            self._ended(self._child)
        if self._child is None and time.monotonic() < self._again_mono:
            return
        child = self._child = self._child or self._start()
        beat = self._beat = read_beat(self._beats) or self._beat  # somebody may have removed the file
        serves = beat is not None and beat.pid == child.pid
        if serves and not (self._serves and os.path.lexists(address_file(self._run_dir))):  # somebody may remove it
            publish_address(self._run_dir, self.address)
        if serves and not self._serves:
            self.published, self._serves = self.address, True
            starts_file(self._run_dir, None).unlink(missing_ok=True)
            self._events.emit("lighthouse_started", address=self.address, pid=child.pid)
        since = beat.mono if beat is not None and serves else self._started_mono
        silent = self._children.looked_mono - max(since, self._children.awake_mono) > SILENCE_S
        if silent and (not serves or self._beats.exists()):
            self._hung = True
            child.signal(signal.SIGKILL)

    def _start(self) -> Child:
        from everstep.quorum.lighthouse import serve

        self._port = self._port or free_port(self._host)
        BeatFile(self._beats).close()  # no room for the file: retried here, but the process would end
        bind, waits = f"{self._host}:{self._port}", (self._ft.join_timeout_s, self._ft.heartbeat_timeout_s)
        main = functools.partial(serve, bind, self._run_dir, self._ft.min_groups, *waits)
        self._started_mono, self._serves, self._hung = time.monotonic(), False, False
        return self._children.start(main, self._run_dir / "logs" / "lighthouse.log")

    def _ended(self, child: Child) -> None:
        reason = "did not answer" if self._hung else "ended"
        self._events.emit("lighthouse_died", exitcode=child.exitcode, reason=reason)
        self._child = None
        if self._serves:
            self._failures = 0
            return
        self._failures += 1
        if not self.published and self._failures == ATTEMPTS:
            log = self._run_dir / "logs" / "lighthouse.log"
            raise LaunchError(f"the lighthouse does not start on {self._host}:{self._port}, see {log}")
        self._again_mono = time.monotonic() + backoff_s(self._failures - 1, LONGEST_PAUSE_S)
        with contextlib.suppress(LaunchError):  # the host may have lost its address for a while
            self._port = free_port(self._host)  # another process may have taken the port
