"""The lighthouse of a run, kept up: published once it listens, started again when it dies and when it hangs.

It keeps no state itself. Groups were told an address that must hold, so it comes back on the same port once anybody can
know it.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.launch.children import Child, Children
from everstep.launch.machine import free_port, listens
from everstep.launch.probe import Probe
from everstep.launch.warm import Request
from everstep.run.address import publish_address, superseded
from everstep.run.events import EventLog

PAUSE_S = 0.2
ATTEMPTS = 5
"""Ports that are tried, one after the other, before nobody knows one."""


class Lighthouse:
    """Its process, address and health. `keep` is called at every turn of a launcher's loop.

    Args:
        run_dir: where the address is published.
        host: what it listens on and what groups are told.
        ft: the run's section.
        children: by whom it is forked.
        events: where its starts and deaths are told.
        say_refused: called with an errno if there was no room for its process.
    """

    def __init__(
        self,
        run_dir: Path,
        host: str,
        ft: FaultTolerance,
        children: Children,
        events: EventLog,
        say_refused: Callable[[str], None],
    ) -> None:
        self.up = False
        """Whether it listens, and its address is published."""
        self._run_dir, self._host, self._ft = run_dir, host, ft
        self._children, self._events, self._say_refused = children, events, say_refused
        self._child: Child | None = None
        self.epoch = 0
        """Of the last publication; 0: there was none."""
        self._port = 0
        self._attempts = 0
        self._next_mono = 0.0
        self._probe: Probe | None = None

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
        """Start it if it is not there, publish it once it listens, kill it if it hangs. Raises OSError if there is no
        room for that."""
        child = self._child
        if child is None:
            if time.monotonic() >= self._next_mono and self._children.warm is not None:
                self._start()
        elif child.alive and not self.up:
            if listens(self._host, self._port):
                self.epoch = publish_address(self._run_dir, self.address, child.pid)
                self.up, self._probe = True, Probe(self.address)
                fields = {"address": self.address, "pid": child.pid, "epoch": self.epoch}
                self._events.emit("lighthouse_started", **fields)
        elif self._hangs:
            child.signal(signal.SIGKILL)

    def close(self) -> None:
        """Ask it nothing more."""
        self.up = False
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    @property
    def _hangs(self) -> bool:
        return self._probe is not None and self._probe.hangs

    def _start(self) -> None:
        self._port = self._port or free_port(self._host)
        options = {
            "--bind": f"{self._host}:{self._port}",
            "--run-dir": self._run_dir,
            "--min-groups": self._ft.min_groups,
            "--heartbeat-timeout-s": self._ft.heartbeat_timeout_s,
            "--join-timeout-s": self._ft.join_timeout_s,
        }
        words = [str(word) for option in options.items() for word in option] + ["--encrypt"] * self._ft.encrypt
        self._child = Child("lighthouse", 0, self._ended, on_refusal=self._refused)
        log = self._run_dir / "logs" / "lighthouse.log"
        self._children.ask(self._child, Request("everstep.quorum.lighthouse:main", [words], log))

    def _refused(self, child: Child, errno: int) -> None:
        self._child, self._next_mono = None, time.monotonic() + PAUSE_S
        if errno:
            self._say_refused(os.strerror(errno))

    def _ended(self, child: Child, exitcode: int) -> None:
        reason = "did not answer" if self._hangs else "ended"
        self._events.emit("lighthouse_died", exitcode=exitcode, reason=reason)
        self._child, self._next_mono = None, time.monotonic() + PAUSE_S
        if not self.epoch:
            self._port = 0  # taken between looking and binding
            self._attempts += 1
        self.close()
