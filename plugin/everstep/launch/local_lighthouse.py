"""The lighthouse of a run on one machine, as its supervisor sees it: where it is, whether it is up or hangs."""

import time
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.launch.machine import HOST, free_port, listens
from everstep.launch.probe import Probe
from everstep.run.address import publish_address

PAUSE_S = 0.2
ATTEMPTS = 5


def arguments(ft: FaultTolerance, bind: str, run_dir: Path) -> list[str]:
    """For `everstep.quorum.lighthouse`, to listen on `bind` ("host:port")."""
    options = {
        "--bind": bind,
        "--run-dir": run_dir,
        "--min-groups": ft.min_groups,
        "--heartbeat-timeout-s": ft.heartbeat_timeout_s,
        "--join-timeout-s": ft.join_timeout_s,
    }
    words = [str(word) for option in options.items() for word in option]
    return [*words, "--encrypt"] if ft.encrypt else words


class LocalLighthouse:
    """Decides; the supervisor starts, kills and reaps.

    Groups were told an address that must hold, so once anybody knows the port, the lighthouse comes back on it.
    """

    def __init__(self) -> None:
        self.up = False
        self._port = 0
        self._attempts = 0
        self._next = 0.0
        self._probe: Probe | None = None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def hangs(self) -> bool:
        """Whether it is up but does not answer any more."""
        return self._probe is not None and self._probe.hangs

    @property
    def cannot_start(self) -> bool:
        return self._attempts >= ATTEMPTS

    def is_due(self) -> bool:
        """Whether to start it now; one that just died is not started again in the same moment."""
        return time.monotonic() >= self._next

    def arguments(self, ft: FaultTolerance, run_dir: Path) -> list[str]:
        """For `everstep.quorum.lighthouse`."""
        self._port = self._port or free_port()
        return arguments(ft, f"{HOST}:{self._port}", run_dir)

    def started(self, run_dir: Path, pid: int) -> None:
        publish_address(run_dir, self.address, pid)

    def look(self) -> None:
        """Find out whether it listens by now."""
        self.up = listens(HOST, self._port)
        if self.up:
            self._probe = Probe(self.address)

    def ended(self, known: bool) -> None:
        """Its process is gone. `known`: whether any group was told its address."""
        self._next = time.monotonic() + PAUSE_S
        if self.up:
            self.close()
        elif not known:
            self._port = 0  # taken between looking and binding
            self._attempts += 1

    def close(self) -> None:
        """Ask it nothing more."""
        self.up = False
        if self._probe is not None:
            self._probe.close()
            self._probe = None
