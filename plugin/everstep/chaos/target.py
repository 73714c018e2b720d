"""Where a run runs, and how its processes are reached there."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from signal import Signals
from typing import ClassVar

import psutil

from everstep.chaos import signals
from everstep.chaos.view import Proc, View
from everstep.run import typed
from everstep.run.directory import holder_of


class Target(ABC):
    """A run's processes, on one machine or on a cluster."""

    kind: ClassVar[str]
    """What `Fault.on` names."""

    def __init__(self, view: View):
        self.run = view

    @property
    def run_dir(self) -> Path:
        return self.run.run_dir

    @abstractmethod
    def alive(self) -> bool:
        """Whether the run goes on."""

    @abstractmethod
    def signal(self, procs: Iterable[Proc], signum: Signals) -> list[int]:
        """Send a signal to processes of the run; returns the pids of those that were reached. Those that are not the
        run's (any more) are left out. Raises LaunchError."""

    def keepers(self, group: int) -> list[Proc]:
        """The processes that hold the group's snapshots."""
        return [Proc(place.pid, place.started_at, "keeper", group) for place in self.run.keepers(group)]


class LocalTarget(Target):
    """A run of `everstep run` on this machine. Everything but keepers descends from the supervisor, which holds the
    run directory's lock; a pid that does not is not touched, whatever the events say."""

    kind = "local"

    def alive(self) -> bool:
        return self.launcher() is not None

    def launcher(self) -> Proc | None:
        """The supervisor; None when it has ended."""
        found = holder_of(self.run_dir)
        return Proc(found[0], found[1], "launcher") if found and signals.is_same(*found) else None

    def signal(self, procs: Iterable[Proc], signum: Signals) -> list[int]:
        return signals.send([(p.pid, p.since) for p in procs if self._ours(p)], signum)

    def _ours(self, proc: Proc) -> bool:
        """Whether the process that has this pid now is a part of this run. That it is the one that the run announced is
        for `signals.send` to see."""
        launcher = self.launcher()
        try:
            process = psutil.Process(proc.pid)
            if process.uids().real != os.geteuid():
                return False
            if proc.role == "keeper":
                # In a session of its own, it may have outlived the supervisor that it descends from.
                return _keeps(process.cmdline(), self.run_dir)
            return launcher is not None and launcher.pid in [proc.pid, *(p.pid for p in process.parents())]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def _keeps(words: list[str], run_dir: Path) -> bool:
    """Whether a command line is that of a keeper of this very run."""
    if words[1:3] != ["-m", "everstep.snapshot.keeper"] or len(words) != 4:
        return False
    try:
        order = typed.loads(words[3])
    except typed.UnfitError:
        return False
    kept = order.get("run_dir") if isinstance(order, dict) else None
    return isinstance(kept, str) and Path(kept).resolve() == run_dir.resolve()
