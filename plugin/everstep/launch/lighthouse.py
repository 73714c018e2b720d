"""The lighthouse of a run, kept up: published once it serves, started again when it dies and when it hangs.

It keeps no state itself. Groups were told an address that must hold, so it comes back on the same port once anybody can
know it. Its process beats: one that hangs keeps its port and its connections.
"""

import signal
import time
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.launch.children import Child, Children
from everstep.launch.forking import Request
from everstep.launch.machine import free_port
from everstep.run.address import publish_address, superseded
from everstep.run.beats import BeatFile, lighthouse_beat_path, read_beat
from everstep.run.directory import wanted_groups
from everstep.run.events import EventLog

PAUSE_S = 0.2
ATTEMPTS = 5
"""Ports that are tried, one after the other, before nobody knows one."""
SILENCE_S = 12.0
"""Without a beat, after which it hangs."""


class Lighthouse:
    """Its process, address and health. `keep` is a job of a launcher.

    Args:
        run_dir: where the address is published.
        host: what it listens on and what groups are told.
        ft: the run's section.
        children: by whom it is forked.
        events: where its starts and deaths are told.
    """

    def __init__(self, run_dir: Path, host: str, ft: FaultTolerance, children: Children, events: EventLog) -> None:
        self.up = False
        """Whether it serves, and its address is published."""
        self._run_dir, self._host, self._ft, self._children, self._events = run_dir, host, ft, children, events
        self._beats = lighthouse_beat_path(run_dir)
        self._child: Child | None = None
        self.epoch = 0
        """Of the last publication; 0: there was none."""
        self._port = 0
        self._attempts = 0
        self._hung = False
        self._next_mono = self._started_mono = 0.0

    @property
    def address(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def cannot_start(self) -> str:
        """Why there is no use in trying again; "": it may work."""
        log = self._run_dir / "logs" / "lighthouse.log"
        where = f"{self._host}:{self._port}" if self._port else self._host
        return f"the lighthouse does not start on {where}, see {log}" if self._attempts >= ATTEMPTS else ""

    @property
    def superseded(self) -> bool:
        """Whether another lighthouse of the run was published after this one."""
        return self.epoch > 0 and superseded(self._run_dir, self.epoch)

    def keep(self) -> None:
        """Start it if it is not there, publish it once it serves, kill it if it hangs. Raises OSError if there is no
        room for that."""
        if (child := self._child) is None:
            if time.monotonic() >= self._next_mono:
                self._start()
            return
        if not child.alive:
            self._ended(child)
            return
        beat = read_beat(self._beats)
        serves = beat is not None and beat.pid == child.pid
        if serves and not self.up:
            self.epoch = publish_address(self._run_dir, self.address, child.pid)
            self.up = True
            self._events.emit("lighthouse_started", address=self.address, pid=child.pid, epoch=self.epoch)
        since = beat.mono if beat is not None and serves else self._started_mono
        if self._children.looked_mono - max(since, self._children.awake_mono) > SILENCE_S:
            self._hung = True
            child.signal(signal.SIGKILL)

    def _start(self) -> None:
        self._port = self._port or free_port(self._host)
        BeatFile(self._beats).close()  # later it needs no room
        options = {
            "--bind": f"{self._host}:{self._port}",
            "--run-dir": self._run_dir,
            "--min-groups": self._ft.min_groups,
            "--groups": wanted_groups(self._run_dir, self._ft.groups),
            "--heartbeat-timeout-s": self._ft.heartbeat_timeout_s,
            "--join-timeout-s": self._ft.join_timeout_s,
        }
        words = [str(word) for option in options.items() for word in option]
        log = self._run_dir / "logs" / "lighthouse.log"
        self._child = self._children.start(Request("everstep.quorum.lighthouse:main", [words], log))
        self._started_mono, self._hung = time.monotonic(), False

    def _ended(self, child: Child) -> None:
        reason = "did not answer" if self._hung else "ended"
        self._events.emit("lighthouse_died", exitcode=child.exitcode, reason=reason)
        self._child, self._next_mono, self.up = None, time.monotonic() + PAUSE_S, False
        if not self.epoch:
            self._port = 0  # taken between looking and binding
            self._attempts += 1
