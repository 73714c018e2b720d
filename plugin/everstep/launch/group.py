"""One replica group's workers on this machine: started, watched, killed, and what their deaths mean.

    waiting → running → ending → waiting …, until it is over

Nothing here waits: `look` is called by the launcher's loop, again and again. A group whose rank died is torn down by
SIGKILL at once: there is nothing left to save. The next incarnation starts when nothing of the last one is left, nor of
what its workers started themselves. Each restart is decided by `watchdog`.
"""

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from everstep.launch import node, offspring
from everstep.launch.children import Child, Children
from everstep.launch.forking import Request
from everstep.launch.incarnation import Incarnation
from everstep.launch.machine import limited_threads
from everstep.launch.meeting import Meeting
from everstep.launch.scarce import Pause
from everstep.launch.settings import GroupSettings
from everstep.launch.watchdog import (
    COMPILING,
    RESTART_WINDOW_S,
    Awake,
    Death,
    Stall,
    failures,
    find_stall,
    in_a_row,
    pause_s,
    reason_to_give_up,
)
from everstep.launch.worker import STACKS_SIGNAL, error_path, log_path
from everstep.run import devices, fence
from everstep.run.beats import DONE, STARTUP, BeatFile, agent_beat_path, beat_path, load_beat, push
from everstep.run.directory import ended_file, starts_file, wanted_groups
from everstep.run.events import EventLog, event_path, last_event
from everstep.run.exits import FENCED_EXIT, GAVE_UP_EXIT, KILLED_EXIT, NODE_BAD_EXIT, UNFIT_EXIT
from everstep.run.fence import Claim
from everstep.run.files import read_json, write_json
from everstep.run.poison import Slot, deaths_at, why_at

WATCH_INTERVAL_S = 0.5
"""How often to look for all but deaths, which are seen at once."""
ASK_AGAIN_S = 3.0
"""A worker that was asked to stop is asked again: a signal that comes while it starts is lost to its handler."""
PEER_FAILS_WITHIN_S = 0.1
"""For how long after an exit somebody who died of a signal is still taken for its cause."""
PEER_FAILS_ELSEWHERE_S = 0.5
"""The same for somebody on another node, whose agent has to tell."""
STOP_GRACE_S = 120.0
"""How long workers may take to end cleanly."""
LITTER_PATIENCE_S = 30.0
"""How long the next incarnation waits for what the last one's workers started and what SIGKILL does not end."""
FAILURES_ARE_TOLD = frozenset(3 * 2**n for n in range(20))
"""After how many failures in a row it is said: the first three, and each time they have doubled."""

State = Literal["waiting", "running", "ending", "over"]
Status = Literal["done", "stopped", "killed", "failed", "fenced", "node_bad", "crashed"]
EXITS: dict[Status, int] = {
    "done": 0, "stopped": 0, "killed": KILLED_EXIT, "failed": GAVE_UP_EXIT, "fenced": FENCED_EXIT,
    "node_bad": NODE_BAD_EXIT, "crashed": 1,
}  # fmt: skip


@dataclass(frozen=True)
class End:
    """How a group ended on this machine, for good."""

    status: Status
    reason: str


def is_spare(settings: GroupSettings) -> bool:
    """Whether the run is to go on without this group (`everstep scale`)."""
    return settings.group >= wanted_groups(settings.run_dir, settings.group + 1)


class Group:
    """One group. `end` is None until it is over.

    Args:
        settings: of it.
        children: by whom its processes are forked.
        stopping: whether a clean stop has been asked for.
        events: its log.

    Raises:
        Fenced: as `Meeting`.
    """

    def __init__(
        self, settings: GroupSettings, children: Children, stopping: Callable[[], bool], events: EventLog
    ) -> None:
        self.settings, self.events = settings, events
        self.state: State = "waiting"
        self.end: End | None = None
        self.deaths: list[Death] = []
        self.last_reason = ""
        """Of the newest death."""
        self.leaves = False
        """Whether it ends cleanly though the run goes on: it has too many groups."""
        self._children, self._run_stops = children, stopping
        self._claim = Claim(settings.job, settings.restart)
        last = last_event(event_path(settings.run_dir, settings.group, None, "agent"), {"workers_started"})
        self._number = self._first_number = 0 if last is None else last["incarnation"] + 1
        """Of the next incarnation; of the first one here."""
        heart = agent_beat_path(settings.run_dir, settings.group, settings.node_rank)
        self._heart = BeatFile(heart)
        self._heart.beat("watching")
        push([heart])  # before the note, by which others begin to listen
        start = self._claim if settings.nodes > 1 else self._first_number
        self._meeting = Meeting(settings, f"group-{settings.group}.{start}")
        self._now: Incarnation | None = None
        self._first: Child | None = None
        """The death that brought the incarnation down."""
        self._first_mono = self._ending_mono = self._not_before_mono = 0.0
        self._scarce = Pause()
        self._next_watch = 0.0
        self._awake = Awake()
        self._stop_deadline: float | None = None
        self._ask_again = 0.0
        self._killed_in_the_end = ""
        """Why a stop was not clean."""

    @property
    def failures(self) -> int:
        """How often it has failed since it, or any group of the run, committed a step."""
        return failures(self.deaths) if self.deaths and not (self._now and self._now.committed) else 0

    def _stopping(self) -> bool:
        return self.leaves or self._run_stops()

    # What the loop calls

    def look(self) -> None:
        """What has happened, and what follows from it. Raises OSError if there is no room for something; it is tried
        again at a later look."""
        if self.state != "over" and time.monotonic() >= self._next_watch:
            self._next_watch = time.monotonic() + WATCH_INTERVAL_S
            self._watch()
        before = None
        while before != self.state:  # what follows at once is not put off to the next turn
            before = self.state
            if self.state == "waiting":
                self._wait_or_start()
            elif self.state == "running":
                self._look_at_workers()
            elif self.state == "ending":
                self._finish_ending()

    def finish(self, status: Status, reason: str) -> None:
        """It is over for good. What still runs of it is killed."""
        if self.end is None:
            self.state, self.end = "over", End(status, reason)
            if self._now is not None:
                self._now.kill()
            self.events.emit("agent_ended", status=status, reason=reason)

    def tell_scarce(self, why: str) -> None:
        """There was no room for something of this group: say so, and wait with its next start."""
        if self._scarce.is_over:  # else it has been said
            wait_s = self._scarce.failed()
            self._not_before_mono = max(self._not_before_mono, self._scarce.until_mono)
            self.events.emit("resource_shortage", reason=why, again_s=wait_s)

    # Twice a second

    def _watch(self) -> None:
        settings, now = self.settings, self._now
        awake_mono = self._awake.look()
        self._heart.beat("watching")
        if not fence.holds(settings.run_dir, settings.group, self._claim):
            self.finish("fenced", f"group {settings.group} was started again elsewhere; this start of it ends")
            return
        if reason := read_json(ended_file(settings.run_dir)).get("reason"):
            self.finish("failed", f"group {settings.group} ends, as the run cannot go on: {reason}")
            return
        # Whoever is asked to stop later hears of this one until then.
        if not self._stopping() and (lost := self._meeting.lost()):
            self.finish("crashed", f"the agent of group {settings.group} failed: {lost}")
            return
        self.leaves |= is_spare(settings)
        if now is None or self.state != "running":
            return
        if not now.committed and now.note_commit():
            self._scarce.worked()
            starts_file(settings.run_dir, settings.group).unlink(missing_ok=True)
        if now.stall is not None:
            now.kill()
        elif self._stopping() or self._dead(now):
            return
        elif now.running and self._meeting.is_awaited:
            self._tear_down(now)
        elif stall := self._find_stall(now, awake_mono):
            now.stall = stall
            self._tell_stall(now, stall)

    def _why_poison(self, slot: Slot) -> str:
        deaths, why = deaths_at(self.settings.run_dir, slot).deaths, why_at(self.settings.run_dir, slot)
        return (
            f"slot {slot[1]} of step {slot[0]} ended the workers of group(s) {', '.join(map(str, sorted(deaths)))}, "
            f"{deaths.total()} times: {why}. Its data, or what the model makes of it, is at fault; "
            'with [fault_tolerance] on_poison = "skip" a run goes on without it'
        )

    def _find_stall(self, now: Incarnation, awake_mono: float) -> Stall | None:
        ft = self.settings.fault_tolerance
        if not ft.enable:
            return None

        def patience(phase: str) -> float:
            compiles = phase in COMPILING and not now.committed
            return ft.startup_timeout_s if compiles or phase == STARTUP else ft.stall_timeout_s

        beats = {rank: load_beat(beat_path(self.settings.run_dir, self.settings.group, rank)) for rank in now.workers}
        return find_stall(now.pids, beats, now.started_mono, patience, time.monotonic(), awake_mono)

    def _tell_stall(self, now: Incarnation, stall: Stall) -> None:
        """Say who hangs, and have each rank write where it is before all are killed, at the next look."""
        self.events.emit(
            "workers_stalled", incarnation=now.number, phase=stall.phase, idle_s=stall.idle_s, stalled_rank=stall.rank
        )
        for child in now.running:
            child.signal(STACKS_SIGNAL)

    # A start

    def _wait_or_start(self) -> None:
        if self._stopping():
            self._end_stopped()
        elif time.monotonic() >= self._not_before_mono:
            self._start()

    def _start(self) -> None:
        settings = self.settings
        if settings.node and (sick := node.storage_complaint(settings.run_dir)):
            self.finish("node_bad", sick)
            return
        place = self._meeting.next_round()
        if place is None:
            return
        now = Incarnation(settings, self._number, place)
        self._number, self._now, self._first, self.state = self._number + 1, now, None, "running"
        listener = place.listener
        try:
            for rank in place.ranks:
                now.workers[rank] = Child("worker", rank, now.on_end)
                self._children.start(now.workers[rank], self._request(now, rank, listener))
                if listener is not None:  # rank 0 has it now, and nobody else is to have it
                    listener.close()
                    listener = None
        except OSError:
            self._tear_down(now)
            raise
        finally:
            if listener is not None:
                listener.close()
        # A group's incarnation is told once, by its first node.
        kind = "workers_started" if settings.node_rank == 0 else "node_workers_started"
        self.events.emit(kind, incarnation=now.number, pids=list(now.pids.values()))

    def _request(self, now: Incarnation, rank: int, listener: socket.socket | None) -> Request:
        settings, place = self.settings, now.place
        error_path(settings.run_dir, settings.group, rank).unlink(missing_ok=True)
        env = place.environment(rank, f"group-{settings.group}", now.number - self._first_number)
        env |= limited_threads(settings.ranks_here or settings.ranks)
        if settings.devices is not None:
            env[devices.VISIBLE] = settings.devices
        if settings.job:
            env[fence.ENVIRONMENT] = str(self._claim)
        args = [str(settings.run_dir), settings.group, now.number, settings.entry, settings.worker_argv]
        log = log_path(settings.run_dir, settings.group, rank)
        if listener is not None:  # it listens already, so that nobody needs to wait for the store
            args = [listener.fileno(), place.host, place.port, *args]
            return Request("everstep.launch.worker:serve_and_start", args, log, env)
        return Request("everstep.launch.worker:start", args, log, env)

    # While they run

    def _look_at_workers(self) -> None:
        now = self._now
        assert now is not None
        if self._stopping():
            self._stop_cleanly(now)
        if self._dead(now):
            self._look_at_death(now)
        elif not now.running:
            self._meeting.tell_ended()
            if self._meeting.all_ended or self._is_overdue():
                self._end_done(now)

    def _look_at_death(self, now: Incarnation) -> None:
        """Find the one that brought the group down. Whom a signal killed takes a while to give its memory back, during
        which a peer may notice and fail."""
        self._first_mono = self._first_mono or time.monotonic()
        dead = self._dead(now)
        hung = [child for child in dead if now.stall is not None and child.index == now.stall.rank]
        first = hung[0] if hung else min(dead, key=lambda child: (child.exitcode or 0) >= 0)
        killed = (first.exitcode or 0) < 0
        waited = time.monotonic() - self._first_mono > PEER_FAILS_WITHIN_S
        if now.stall is None and not killed and now.running and not waited:
            return
        self._first = first
        if killed and now.stall is None:
            self._meeting.tell_killed()
        self._tear_down(now)

    def _dead(self, now: Incarnation) -> list[Child]:
        """Those that ended before they had done their work, be it with status 0, in the order of their deaths."""
        return [child for child in now.ended if child.exitcode != 0 or not self._is_done(child)]

    def _is_done(self, child: Child) -> bool:
        beat = load_beat(beat_path(self.settings.run_dir, self.settings.group, child.index))
        return beat is not None and beat.pid == child.pid and beat.phase == DONE

    # A clean stop

    def _stop_cleanly(self, now: Incarnation) -> None:
        mono = time.monotonic()
        if self._stop_deadline is None:
            self._stop_deadline = mono + STOP_GRACE_S
        if self._is_overdue():
            if now.running:
                self._killed_in_the_end = f"did not end within {STOP_GRACE_S:g} s and was killed"
                self._tear_down(now)
        elif mono >= self._ask_again:
            self._ask_again = mono + ASK_AGAIN_S
            for child in now.running:
                if not self._is_done(child):
                    child.signal(signal.SIGTERM)

    def _is_overdue(self) -> bool:
        """Whether a clean stop has taken as long as it may."""
        return self._stop_deadline is not None and time.monotonic() > self._stop_deadline

    def _end_stopped(self) -> None:
        self._meeting.tell_ended()  # the other nodes have nobody to wait for
        if self._killed_in_the_end:
            self.finish("killed", self._killed_in_the_end)
        else:
            self.finish("stopped", "asked to stop")

    def _end_done(self, now: Incarnation) -> None:
        """All workers have done their work."""
        self._tear_down(now)
        path = event_path(self.settings.run_dir, self.settings.group, 0, "worker")
        last = last_event(path, {"training_done", "left"})
        if self._stopping():
            self._end_stopped()
        elif last is not None and last["kind"] == "left":
            self.finish("stopped", "its workers were asked to stop")
        else:
            self.finish("done", "its workers finished")

    # The end of an incarnation

    def _tear_down(self, now: Incarnation) -> None:
        now.kill()
        self.state, self._ending_mono = "ending", time.monotonic()

    def _finish_ending(self) -> None:
        """Once nothing of the incarnation is left, nor of what its workers started: what comes after it."""
        now, ended_s = self._now, time.monotonic() - self._ending_mono
        assert now is not None
        if now.running:
            return
        left = self._children.left_behind()
        offspring.kill(left)
        if left and ended_s < LITTER_PATIENCE_S:
            return
        for pid in now.pids.values():
            self._children.forget(pid)
        if self.settings.nodes > 1 and ended_s < PEER_FAILS_ELSEWHERE_S:
            return  # another node may tell that it is to blame
        first, self._now, self._first_mono, self.state = self._first, None, 0.0, "waiting"
        if first is not None:
            self._after_death(now, first)
        elif self._stopping():
            self._end_stopped()

    def _after_death(self, now: Incarnation, first: Child) -> None:
        """Tell how the workers ended, `first` before the others, count it, and decide whether they start again."""
        settings = self.settings
        peer_killed = (first.exitcode or 0) > 0 and self._meeting.others_were_killed
        death = now.death_of(first, peer_killed=peer_killed)
        self.deaths.append(death)
        reason, error = now.why(first, death), now.error_of(first)
        self.last_reason = reason
        told = f"group {settings.group}, incarnation {now.number}: {reason}\n{error.traceback if error else ''}"
        print(told.strip(), flush=True)
        slot = now.slot_of(first)
        why = error.first_line if error else reason
        poison = slot is not None and now.strike(slot, death, why, self.events)
        self.events.emit(
            "workers_died",
            incarnation=now.number,
            reason=reason,
            error=error.first_line if error else "",
            committed=death.committed,
            by_itself=death.by_itself,
            exitcodes={str(first.index): death.exitcode},
        )
        if self._stopping():
            # A worker that has not begun yet has nothing to finish: SIGTERM just ends it.
            if death.exitcode != -signal.SIGTERM and not self._killed_in_the_end:
                self._killed_in_the_end = reason
            self._end_stopped()
        elif settings.node and (bad := self._reason_to_move(death)):
            self.finish("node_bad", f"{bad}; last: {reason}")
        elif slot is not None and poison:
            self.deaths.pop()  # the next start does without it, or there is none
            if settings.fault_tolerance.on_poison == "stop":
                why = self._why_poison(slot)
                write_json(ended_file(settings.run_dir), {"reason": why})  # other groups read it
                self.finish("failed", why)
        else:
            self._decide(reason)

    def _decide(self, reason: str) -> None:
        """Start again, later if it has failed before; or not."""
        ft, number = self.settings.fault_tolerance, self.settings.group
        if why := reason_to_give_up(self.deaths, ft.max_restarts, RESTART_WINDOW_S):
            self.finish("failed", f"group {number} is given up, {why}; last: {reason}")
            return
        wait_s, count = pause_s(self.deaths), in_a_row(self.deaths)
        self._not_before_mono = time.monotonic() + wait_s
        if count in FAILURES_ARE_TOLD:
            said = f"group {number} has failed {count} times in a row: {reason}"
            self.events.emit("group_failing", count=count, reason=said, again_s=wait_s)

    def _reason_to_move(self, death: Death) -> str:
        """Why the group should go on without this node; "" if it need not."""
        if death.exitcode == UNFIT_EXIT:
            return "its arithmetic was wrong twice in the same place"
        ft = self.settings.fault_tolerance
        recent = sum(one.mono > death.mono - RESTART_WINDOW_S for one in self.deaths)
        if 0 < ft.node_failures <= recent:
            within = f"{RESTART_WINDOW_S:g} s (fault_tolerance.node_failures)"
            return f"workers died here {recent} times within {within}"
        return ""
