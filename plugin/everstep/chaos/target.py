"""Where a run runs, and how signals reach its processes there."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import psutil

from everstep.chaos import signals
from everstep.chaos.view import Proc, View
from everstep.run import typed
from everstep.run.directory import holder_of


class Target(ABC):
    """A run's processes, on one machine or on a cluster."""

    kind: ClassVar[str]
    """The name by which `Kind.on` refers to the class."""

    def __init__(self, view: View):
        self.run = view

    @property
    def run_dir(self) -> Path:
        return self.run.run_dir

    @abstractmethod
    def alive(self) -> bool:
        """Whether the run is still going."""

    @abstractmethod
    def signal(self, procs: Iterable[Proc], signum: int) -> list[int]:
        """Send a signal, or 0, to processes of the run. Return the pids of those that got it; processes that are not,
        or no longer, the run's are left out. Raises LaunchError."""

    def keepers(self, group: int) -> list[Proc]:
        """Return the processes that hold the group's snapshots."""
        return [Proc(place.pid, place.started_at, "keeper", group) for place in self.run.keepers(group)]


class LocalTarget(Target):
    """A run of `everstep run` on this machine. All its processes but keepers descend from the supervisor, which holds
    the lock of the run directory. A process that does not is never signalled, whatever the events say."""

    kind = "local"

    def alive(self) -> bool:
        return self._launcher() is not None

    def _launcher(self) -> int | None:
        """Return the supervisor's pid; None if it has ended."""
        pid = holder_of(self.run_dir)
        return pid if pid and signals.is_same(pid, time.time()) else None

    def signal(self, procs: Iterable[Proc], signum: int) -> list[int]:
        return signals.send([(p.pid, p.since) for p in procs if self._ours(p)], signum)

    def _ours(self, proc: Proc) -> bool:
        """Whether the process that has this pid now belongs to this run. `signals.send` checks that it is also the one
        that the run announced."""
        try:
            process = psutil.Process(proc.pid)
            if process.uids().real != os.geteuid():
                return False
            if proc.role == "keeper":
                # It has its own session, and may have outlived the supervisor that it descends from.
                return _keeps(process.cmdline(), self.run_dir)
            return self._launcher() in [proc.pid, *(p.pid for p in process.parents())]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def _keeps(words: list[str], run_dir: Path) -> bool:
    """Whether a command line is that of a keeper of this run directory."""
    if words[1:3] != ["-m", "everstep.snapshot.keeper"] or len(words) != 4:
        return False
    try:
        order = typed.loads(words[3])
    except typed.UnfitError:
        return False
    kept = order.get("run_dir") if isinstance(order, dict) else None
    return isinstance(kept, str) and Path(kept).resolve() == run_dir.resolve()
