"""One incarnation: the worker processes of one start of a group, and the cause of their end."""

import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.launch.children import Child
from everstep.launch.rendezvous import RendezvousRound
from everstep.launch.restart_rules import CRASHES, HOPELESS, Death, describe_exit, oom_kills
from everstep.launch.settings import GroupSettings
from everstep.launch.worker import STACKS_SIGNAL
from everstep.run import poison
from everstep.run.beats import DONE, STARTUP, Beat, beat_path, read_beat
from everstep.run.events import EventLog, event_path, last_event
from everstep.run.poison import Slot

COMPILING = ("compute", "reduce", "vote")
"""Phases in which a worker compiles during its first step, or waits for a rank that does."""
SYSTEM_ERROR = re.compile(r"\w+: \[Errno \d+\]")
"""Matches an error of the operating system, such as of the data's file system (`Death.error`)."""


def last_commits(run_dir: Path) -> list[dict[str, Any]]:
    """Return the last commit event of each group that has one."""
    logs = event_path(run_dir, 0, 0, "worker").parent.glob("group-*.rank-0.jsonl")
    return [commit for log in logs if (commit := last_event(log, {"commit"})) is not None]


@dataclass
class Incarnation:
    """One start of a group's workers on this node."""

    settings: GroupSettings
    number: int
    round: RendezvousRound
    workers: dict[int, Child] = field(default_factory=dict)
    """Rank -> its process."""
    stalled: Child | None = None
    """The worker without progress because of which the incarnation is killed."""
    stall: str = ""
    """A description of that stall."""
    culprit: Child | None = None
    """The worker whose death brought the incarnation down."""
    ending_mono: float = 0.0
    """Monotonic seconds at which it was killed; 0 while it runs."""
    committed: bool = False
    """Whether it has committed a step, as of the last `note_commit`."""

    def __post_init__(self) -> None:
        self.started_mono = time.monotonic()
        self._oom_kills = oom_kills()
        self._beats: dict[int, Beat] = {}
        self._commit_before = self._last_commit()

    @property
    def running(self) -> list[Child]:
        """The workers that live."""
        return [child for child in self.workers.values() if child.alive]

    @property
    def ended(self) -> list[Child]:
        """The workers that have ended, in the order in which they were reaped."""
        return sorted((one for one in self.workers.values() if not one.alive), key=lambda one: one.ended_mono)

    @property
    def dead(self) -> list[Child]:
        """The workers that ended without having finished, even if their status is 0, in the order of `ended`."""
        return [child for child in self.ended if child.exitcode != 0 or not self.is_done(child)]

    def _beat_of(self, child: Child) -> Beat | None:
        """Return the last beat of a worker, also if somebody has removed its file since; None if none was seen yet.
        Raises OSError if it cannot be read now."""
        beat = read_beat(beat_path(self.settings.run_dir, self.settings.group, child.rank))
        if beat is not None and beat.pid == child.pid:
            self._beats[child.rank] = beat
        return self._beats.get(child.rank)

    def is_done(self, child: Child) -> bool:
        """Return whether a worker's beat says that it has finished."""
        beat = self._beat_of(child)
        return beat is not None and beat.phase == DONE

    def _last_commit(self) -> dict[str, Any] | None:
        return last_event(event_path(self.settings.run_dir, self.settings.group, 0, "worker"), {"commit"})

    def note_commit(self) -> bool:
        """Check whether it has committed a step by now, and return that."""
        if not self.committed:
            self.committed = self._last_commit() != self._commit_before
        return self.committed

    def kill(self) -> None:
        """Send SIGKILL to all workers; the incarnation is ending from now on."""
        self.ending_mono = self.ending_mono or time.monotonic()
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        for child in self.running:
            child.signal(signum)

    def look_for_stall(self, events: EventLog, now_mono: float, awake_mono: float) -> None:
        """Find a stalled rank; of several, the one that has been silent for longest. The first call that finds one
        reports it and has each rank write its stacks; the next call kills the workers. Silence before `awake_mono` does
        not count."""
        ft, stalls = self.settings.fault_tolerance, []
        if self.stalled is not None and self.running:
            self.culprit = self.stalled
            self.kill()
        if self.stalled is not None or not ft.enable:
            return
        for child in self.running:
            beat = self._beat_of(child)
            phase, since = (STARTUP, self.started_mono) if beat is None else (beat.phase, beat.mono)
            starts = phase == STARTUP or (phase in COMPILING and not self.committed)
            patience_s = ft.startup_timeout_s if starts else ft.stall_timeout_s
            silent = now_mono - max(since, awake_mono) > patience_s
            # Somebody may have removed the file of a worker that has beaten: then it is not known.
            if silent and (beat is None or beat_path(self.settings.run_dir, self.settings.group, child.rank).exists()):
                stalls.append((now_mono - since, child.rank, phase))
        if stalls:
            idle_s, rank, phase = max(stalls)
            self.stalled, self.stall = self.workers[rank], f"rank {rank} stalled in {phase} for {idle_s:.1f} s"
            told = {"stalled_rank": rank, "phase": phase, "idle_s": idle_s}
            events.emit("workers_stalled", incarnation=self.number, **told)
            self._signal(STACKS_SIGNAL)

    def find_culprit(self, patience_s: float) -> Child | None:
        """Return the worker whose death brought the group down; None if that is not known yet. A worker killed by a
        signal takes a while to give its memory back; meanwhile a peer may notice and exit with an error first. So
        after an exit, the death of another worker by a signal is awaited for `patience_s`."""
        dead = self.dead
        if self.stalled is not None:
            return self.stalled if self.stalled in dead else dead[0]
        culprit = min(dead, key=lambda child: (child.exitcode or 0) >= 0)
        waited = time.monotonic() - dead[0].ended_mono > patience_s
        return culprit if (culprit.exitcode or 0) < 0 or waited or not self.running else None

    def death_of(self, culprit: Child, *, peer_killed: bool) -> Death:
        """Describe and print the death of `culprit`, which ended the incarnation. `peer_killed`: whether a signal
        killed a rank on another machine, which explains errors of ranks that wait for it."""
        settings, exitcode, stalled = self.settings, culprit.exitcode or 0, self.stalled is not None
        ft, lived_s = settings.fault_tolerance, time.monotonic() - self.started_mono
        out_of_memory = exitcode == -signal.SIGKILL and not stalled and oom_kills() > self._oom_kills
        log = event_path(settings.run_dir, settings.group, culprit.rank, "worker")
        told = last_event(log, {"worker_failed", "commit"}) if exitcode > 0 else None  # commits bound the search
        error, traceback = (told["error"], told["traceback"]) if told and told.get("pid") == culprit.pid else ("", [])
        newest = max(last_commits(settings.run_dir), key=lambda commit: commit["step"], default={"step": 0})
        reason = self.stall or f"rank {culprit.rank} {describe_exit(exitcode)}"
        if out_of_memory:
            reason += ", by the kernel: the memory of its control group was used up"
        elif error and not stalled:
            reason += f": {error}"
        print(f"group {settings.group}, incarnation {self.number}: {reason}", *traceback, sep="\n", flush=True)
        crashed = exitcode >= 0 or stalled or -exitcode in CRASHES or out_of_memory
        return Death(
            mono=time.monotonic(),
            exitcode=exitcode,
            committed=self.note_commit() if ft.enable else lived_s > ft.startup_timeout_s,
            reason=reason,
            error=error,
            run_step=newest["step"],
            step_s=newest.get("took_s") or 0.0,
            by_itself=crashed and (out_of_memory or not peer_killed),
        )

    def poison_of(self, culprit: Child, death: Death, events: EventLog) -> tuple[Slot, list[int]] | None:
        """Record a crash at the slot that `culprit` computed when it died. If the slot is poison by now, return its
        step and number, and the groups whose workers crashed there; else None. The crash that makes it poison is
        reported."""
        run_dir, group, on_poison = self.settings.run_dir, self.settings.group, self.settings.fault_tolerance.on_poison
        if not death.by_itself or death.exitcode in HOPELESS:  # the slot is not why it ended
            return None
        if on_poison == "stop" and SYSTEM_ERROR.match(death.error):  # an outage, which may pass, must not end the run
            return None
        try:
            beat = self._beat_of(culprit)
            if beat is None or beat.phase != "compute" or beat.slot < 0:
                return None
            slot = beat.step, beat.slot
            known = poison.poisoned(run_dir, slot)
            poison.record_crash(run_dir, slot, group, self.number, worked=death.committed)
            groups = poison.poisoned(run_dir, slot)
        except OSError as error:  # a full disk must not prevent a restart
            print(f"the slot at which group {group} died could not be recorded: {error}", flush=True)
            return None
        if groups and not known:
            told = {"groups": sorted({*groups}), "error": death.error or death.reason, "action": on_poison}
            events.emit("poison_slot", slot[0], slot=slot[1], **told)
        return (slot, groups) if groups else None
