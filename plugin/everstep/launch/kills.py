"""`--chaos-every S`: every S seconds all workers of one random group are killed."""

import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

from everstep.report.events import EventLog


def choose_victim(chooser: random.Random, taking_part: Iterable[int], groups: int) -> int | None:
    """A group to kill, or None while none may be.

    Only groups that take part now are hit: one that is still coming back is not hit again. The last of
    several is spared: nobody would hold the state.
    """
    candidates = sorted(taking_part)
    if not candidates or (groups > 1 and len(candidates) < 2):
        return None
    return chooser.choice(candidates)


class RandomKills:
    """Follows the events of a run and kills on schedule. The same seed chooses in the same order."""

    def __init__(self, run_dir: Path, groups: int, every_s: float, seed: int):
        self._events = EventLog(run_dir, None, None, "chaos")
        self._groups = groups
        self._every_s = every_s
        self._chooser = random.Random(seed)
        self._taking_part: set[int] = set()
        self._workers: dict[int, dict] = {}
        self._due: float | None = None

    def follow(self, events: Iterable[dict]) -> None:
        """Take note of who has workers and who takes part."""
        for event in events:
            group = event["group"]
            if event["kind"] == "workers_started":
                self._workers[group] = event
                self._taking_part.discard(group)
            elif event["kind"] == "workers_died":
                self._taking_part.discard(group)
            elif event["kind"] == "commit" and group in event["groups"]:
                started = self._workers.get(group)
                if started is not None and event["mono"] > started["mono"]:
                    self._taking_part.add(group)

    def tick(self, now: float) -> None:
        """Kill if it is time; `now` is `time.monotonic()`. The clock starts with the first step."""
        if self._due is None:
            if self._taking_part:
                self._due = now + self._every_s
            return
        if now < self._due:
            return
        victim = choose_victim(self._chooser, self._taking_part, self._groups)
        if victim is None:
            return
        self._due = now + self._every_s  # a kill that had to wait does not bring the next one closer
        self._taking_part.discard(victim)
        started = self._workers[victim]
        pids = [pid for pid in started["pids"] if _is_worker(pid, started["t"])]
        self._events.emit("fault", fault="kill-group", target_group=victim, pids=pids)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _is_worker(pid: int, announced: float) -> bool:
    """Whether `pid` is still the process announced at that wall time, not a later one of the same number."""
    try:
        return psutil.Process(pid).create_time() <= announced + 1.0
    except psutil.NoSuchProcess:
        return False
