"""One replica group's workers on this machine: starts, watches and kills them, and decides what follows a death.

    waiting → running → ending → waiting …, until the group is over

The launcher's loop calls `tick` again and again. It returns at once, except while an earlier start of the group ends.
If one rank dies, the others are killed at once by SIGKILL, as there is nothing left to save. The next incarnation
starts when all processes of the last one, and those that its workers started, are gone. `restart_rules` has the rules.
"""

import contextlib
import errno
import functools
import signal
import socket
import time
from collections.abc import Callable

from everstep.launch.children import Child, Children
from everstep.launch.incarnation import Incarnation
from everstep.launch.machine import VISIBLE, limited_threads, storage_complaint
from everstep.launch.rendezvous import Rendezvous
from everstep.launch.restart_rules import HOPELESS, WINDOW_S, Death, backoff_s, failures, in_a_row
from everstep.launch.settings import GroupSettings
from everstep.launch.worker import log_path, start
from everstep.run import fence
from everstep.run.beats import BeatFile, agent_beat_path, beat_path, push_to_server
from everstep.run.directory import End, check_room, ended_file, exact_file, is_surplus, starts_file
from everstep.run.events import EventLog, event_path, last_event
from everstep.run.exits import FENCED_EXIT, GAVE_UP_EXIT, NODE_BAD_EXIT, UNFIT_EXIT, USAGE_EXIT
from everstep.run.files import read_json, write_json
from everstep.run.poison import Slot

WATCH_INTERVAL_S = 0.5
"""Seconds between two checks for everything but deaths, which are seen at once."""
PEER_FAILS_WITHIN_S = 0.1
"""Seconds after a worker's exit within which the death of another by a signal counts as the cause."""
PEER_FAILS_ELSEWHERE_S = 0.5
"""The same for a worker on another node, whose agent has to report the death."""
STOP_GRACE_S = 120.0
"""Seconds that workers may take to end cleanly, beside `stall_timeout_s`, in which they may write a checkpoint."""
CLEANUP_TIMEOUT_S = 30.0
"""Seconds to wait after SIGKILL for workers, and for processes that they started, before going on without their end."""
KEPT_DEATHS = 1000
"""Number of a group's newest deaths that its launcher remembers."""
FAILURES_ARE_TOLD = frozenset(3 * 2**n for n in range(20))
"""Numbers of failures in a row at which an event reports them: 3, 6, 12 and so on."""

EXITS = {
    "done": 0, "stopped": 0, "killed": 1, "crashed": 1, "failed": GAVE_UP_EXIT, "fenced": FENCED_EXIT,
    "node_bad": NODE_BAD_EXIT,
}  # fmt: skip
"""Status with which a group ended -> exit status of its agent."""


class Group:
    """One group on this machine. `end` says how it ended, and is None until it is over.

    Args:
        children: the launcher's children, which fork its processes.
        stopping: returns whether a clean stop was requested.
        events: the log of the group.
    """

    def __init__(
        self, settings: GroupSettings, children: Children, stopping: Callable[[], bool], events: EventLog
    ) -> None:
        self.settings, self.events = settings, events
        self.end: End | None = None
        self.deaths: list[Death] = []
        self.leaves = False
        """Whether it ends cleanly while the run goes on, because the run should have fewer groups."""
        self._children, self._run_stops = children, stopping
        last = last_event(event_path(settings.run_dir, settings.group, None, "agent"), {"workers_started"})
        self._number = 0 if last is None else last["incarnation"] + 1
        """Number of the next incarnation."""
        self._heart: BeatFile | None = None
        self._rendezvous: Rendezvous | None = None
        self._now: Incarnation | None = None
        self._not_before_mono = self._next_watch = self._stop_deadline = 0.0

    def failures(self, run_step: int) -> int:
        """Return how often it has failed since its own last commit and since the run's newest step, `run_step`."""
        return 0 if self._now and self._now.committed else failures(self.deaths, run_step)

    def _stopping(self) -> bool:
        return self.leaves or self._run_stops()

    # What the loop calls

    def tick(self) -> None:
        """Check what has happened to the group, and act on it. Raises LaunchError, or OSError for a shortage."""
        try:
            rendezvous = self._rendezvous or self._join()
        except fence.Fenced as fenced:
            self.finish("fenced", str(fenced))
            return
        if time.monotonic() >= self._next_watch:
            self._next_watch = time.monotonic() + WATCH_INTERVAL_S
            self._watch(rendezvous)
        if self.end is None and self._now is not None and not self._now.ending_mono:
            self._check_workers(self._now, rendezvous)
        if self.end is None and self._now is not None and self._now.ending_mono:
            self._finish_ending(self._now, rendezvous)
        if self.end is None and self._now is None:
            if self._stopping():
                self._end_stopped(rendezvous)
            elif time.monotonic() >= self._not_before_mono:
                self._start(rendezvous)

    def finish(self, status: str, reason: str) -> None:
        """End the group for good. Workers that still run are killed."""
        if self.end is None:
            self.end = End(status, reason)
            if self._now is not None:
                self._now.kill()
            self.events.emit("agent_ended", status=status, reason=reason)
            if status in ("killed", "failed"):  # by its last beat, other groups would wait for its state
                with contextlib.suppress(OSError):
                    beat_path(self.settings.run_dir, self.settings.group, 0).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files of a group that is over."""
        self.events.close()
        if self._heart is not None:
            self._heart.close()

    def _join(self) -> Rendezvous:
        """Claim the group for this start of it, and join the other nodes' agents. Raises Fenced."""
        settings = self.settings
        if settings.node_rank == 0:
            fence.claim_group(settings.run_dir, settings.group, settings.claim, self._stopping)
        if self._heart is None:
            self._heart = BeatFile(agent_beat_path(settings.run_dir, settings.group, settings.node_rank))
        self.beat()  # before the rendezvous's note, from which on other nodes expect beats
        self._rendezvous = Rendezvous(settings)
        return self._rendezvous

    def beat(self, phase: str = "watching") -> None:
        """Write a beat of this agent; the phase DONE says that it ends."""
        if self._heart is None:  # it has not joined yet
            return
        self._heart.beat(phase)
        if self.settings.job or self.settings.nodes > 1:  # other hosts read these beats
            run_dir, group, node_rank = self.settings.run_dir, self.settings.group, self.settings.node_rank
            push_to_server([beat_path(run_dir, group, 0), agent_beat_path(run_dir, group, node_rank)])

    # Twice a second

    def _watch(self, rendezvous: Rendezvous) -> None:
        settings, now = self.settings, self._now
        self.beat()
        if not fence.holds(settings.run_dir, settings.group, settings.claim):
            self.finish("fenced", f"group {settings.group} was started again elsewhere; this start of it ends")
        elif reason := read_json(ended_file(settings.run_dir)).get("reason"):
            self.finish("failed", f"group {settings.group} ends, as the run cannot go on: {reason}")
        # A stopping agent does not judge the other nodes. It goes on beating, for those that are asked to stop later.
        elif not self._stopping() and (lost := rendezvous.lost(self._children.looked_mono, self._children.awake_mono)):
            self.finish("crashed", f"the agent of group {settings.group} failed: {lost}")
        self.leaves |= is_surplus(settings.run_dir, settings.group)
        if self.end is not None or now is None or now.ending_mono:
            return
        if not now.committed and now.note_commit():
            starts_file(settings.run_dir, settings.group).unlink(missing_ok=True)
        if self._stopping():
            self._stop_cleanly(now, rendezvous)
        if self.end is not None or (now.stalled is None and (self._stopping() or now.dead)):
            return
        if now.stalled is None and rendezvous.is_awaited:  # also if a node's workers died after those here had finished
            now.kill()
        else:
            now.look_for_stall(self.events, self._children.looked_mono, self._children.awake_mono)

    # A start

    def _start(self, rendezvous: Rendezvous) -> None:
        settings = self.settings
        if not settings.node:
            check_room(settings.run_dir)  # workers that start on a full disk fail, and cannot say why
        elif sick := storage_complaint(settings.run_dir):
            self.finish("node_bad", sick)
            return
        next_round = rendezvous.next_round()
        if next_round is None:
            return
        now = self._now = Incarnation(settings, self._number, next_round)
        self._number += 1
        listener = next_round.listener
        try:
            for rank in next_round.ranks:
                now.workers[rank] = self._fork(now, rank, listener)
                if listener is not None:  # the first rank has inherited it; no other process should
                    listener.close()
                    listener = None
        except OSError:
            now.kill()
            raise
        finally:
            if listener is not None:
                listener.close()
        # Only the first node reports a new incarnation of the group as such.
        kind = "workers_started" if settings.node_rank == 0 else "node_workers_started"
        self.events.emit(kind, incarnation=now.number, pids=[child.pid for child in now.workers.values()])

    def _fork(self, now: Incarnation, rank: int, listener: socket.socket | None) -> Child:
        settings = self.settings
        env = now.round.environment(rank, now.number)
        first = read_json(exact_file(settings.run_dir)) if settings.fault_tolerance.exact else {}
        env |= limited_threads(settings.ranks_here or settings.ranks, str(first.get("threads", "")))  # for equal bits
        if settings.devices is not None:
            env[VISIBLE] = settings.devices
        if settings.job:
            env[fence.ENVIRONMENT] = str(settings.claim)
        serves = -1 if listener is None else listener.fileno()
        run_dir, group = settings.run_dir, settings.group
        worker = functools.partial(start, run_dir, group, now.number, settings.worker_argv, serves)
        return self._children.start(worker, log_path(run_dir, group, rank), env, rank)

    # While they run

    def _check_workers(self, now: Incarnation, rendezvous: Rendezvous) -> None:
        if now.dead:
            now.culprit = now.find_culprit(PEER_FAILS_WITHIN_S)
            if now.culprit is not None:
                if (now.culprit.exitcode or 0) < 0 and now.stalled is None:
                    rendezvous.tell_killed()
                now.kill()
        elif not now.running:
            rendezvous.tell_ended()
            if rendezvous.all_ended or self._is_overdue():
                now.kill()

    def _stop_cleanly(self, now: Incarnation, rendezvous: Rendezvous) -> None:
        """Ask the workers to stop. Called at each check, because a worker that is starting may miss a signal."""
        grace_s = STOP_GRACE_S + self.settings.fault_tolerance.stall_timeout_s
        self._stop_deadline = self._stop_deadline or time.monotonic() + grace_s
        if self._is_overdue() and now.running:
            self._end_stopped(rendezvous, f"its workers did not stop within {grace_s:g} s and were killed")
            return
        for child in now.running:
            if not now.is_done(child):
                child.signal(signal.SIGTERM)

    def _is_overdue(self) -> bool:
        """Return whether a clean stop has taken longer than it may."""
        return 0.0 < self._stop_deadline < time.monotonic()

    def _end_stopped(self, rendezvous: Rendezvous, unclean: str = "") -> None:
        """End the group, which was asked to stop. `unclean`: why the stop was not clean; "" if it was."""
        rendezvous.tell_ended()  # so that the other nodes do not wait for this one
        if unclean:
            self.finish("killed", unclean)
        else:
            self.finish("stopped", "the run should have fewer groups" if self.leaves else "asked to stop")

    # The end of an incarnation

    def _finish_ending(self, now: Incarnation, rendezvous: Rendezvous) -> None:
        """Once all processes of the incarnation are gone, with those that workers had started, decide what follows."""
        ended_s = time.monotonic() - now.ending_mono
        if now.running:
            if ended_s > CLEANUP_TIMEOUT_S:
                self._give_up_waiting(now.running[0], ended_s)
            return
        if self._children.kill_left_behind() and ended_s < CLEANUP_TIMEOUT_S:
            return
        if self.settings.nodes > 1 and now.culprit is not None and ended_s < PEER_FAILS_ELSEWHERE_S:
            return  # another node may still report that the death began there
        self._now = None
        if now.culprit is not None:
            self._after_death(now, now.culprit, rendezvous)
        elif self._stopping():
            self._end_stopped(rendezvous)
        elif not now.dead and len(now.ended) == len(now.round.ranks) and not rendezvous.is_awaited:
            self._end_done()

    def _give_up_waiting(self, stuck: Child, ended_s: float) -> None:
        """Give up waiting for a worker that SIGKILL does not end, because a driver or a file system holds it in the
        kernel. Raises OSError if the group neither stops nor can move to another node: then only waiting helps."""
        reason = f"rank {stuck.rank} (process {stuck.pid}) has not ended since it was killed {ended_s:.0f} s ago"
        if self._stopping():
            self.finish("killed", reason)
        elif self.settings.node:
            self.finish("node_bad", reason)
        else:
            raise OSError(errno.EAGAIN, reason)

    def _end_done(self) -> None:
        """End the group, whose workers have all finished or left."""
        path = event_path(self.settings.run_dir, self.settings.group, 0, "worker")
        last = last_event(path, {"training_done", "left"})
        if last is not None and last["kind"] == "left":
            self.finish("stopped", "its workers were asked to stop")
        else:
            self.finish("done", "its workers finished")

    def _after_death(self, now: Incarnation, culprit: Child, rendezvous: Rendezvous) -> None:
        """Report and count the death of the workers, which `culprit` caused, and decide whether to restart."""
        settings = self.settings
        peer_killed = (culprit.exitcode or 0) > 0 and rendezvous.others_were_killed
        death = now.death_of(culprit, peer_killed=peer_killed)
        self.deaths.append(death)
        del self.deaths[:-KEPT_DEATHS]
        poison = now.poison_of(culprit, death, self.events)
        # A configuration with which the group made steps is valid: a file that it names may only be away.
        worked = any(one.committed for one in self.deaths)
        self.events.emit(
            "workers_died",
            incarnation=now.number,
            reason=death.reason,
            error=death.error,
            committed=death.committed,
            by_itself=death.by_itself,
            exitcodes={str(culprit.rank): death.exitcode},
        )
        if self._stopping():
            # SIGTERM kills a worker that has not begun yet. That stop is clean: it had nothing to finish.
            self._end_stopped(rendezvous, "" if death.exitcode == -signal.SIGTERM else death.reason)
        elif settings.node and (bad := self._reason_to_move(death)):
            self.finish("node_bad", f"{bad}; last: {death.reason}")
        elif poison is not None:
            self.deaths.pop()  # it does not count: the next start skips the slot, or there is no next start
            if settings.fault_tolerance.on_poison == "stop":
                self._end_poisoned(*poison, death.error or death.reason)
        elif death.exitcode in HOPELESS and not (death.exitcode == USAGE_EXIT and worked):
            why = HOPELESS[death.exitcode]
            self.finish("failed", f"group {settings.group} is given up, {why}; last: {death.reason}")
        else:
            self._schedule_restart()

    def _schedule_restart(self) -> None:
        """Restart after a backoff that grows with the failures in a row; the first restart is at once."""
        count = len(in_a_row(self.deaths))
        wait_s = backoff_s(count - 1)
        self._not_before_mono = time.monotonic() + wait_s
        if count in FAILURES_ARE_TOLD:
            said = f"group {self.settings.group} has failed {count} times in a row: {self.deaths[-1].reason}"
            self.events.emit("group_failing", count=count, reason=said, again_s=wait_s)

    def _end_poisoned(self, slot: Slot, groups: list[int], why: str) -> None:
        """End the group, and by `ended_file` all others, because every group that computes this slot dies."""
        reason = (
            f"slot {slot[1]} of step {slot[0]} ended the workers of group(s) {', '.join(map(str, sorted({*groups})))} "
            f"({len(groups)} deaths): {why}. Its data, or what the model computes from it, is the cause. Check it, or "
            'set [fault_tolerance] on_poison = "skip" (not with [semi_sync]) to go on without the slot'
        )
        write_json(ended_file(self.settings.run_dir), {"reason": reason})
        self.finish("failed", reason)

    def _reason_to_move(self, death: Death) -> str:
        """Return why the group should move to another node; "" if it need not."""
        if death.exitcode == UNFIT_EXIT:
            return "its trainer found this machine's results or data wrong"
        ft = self.settings.fault_tolerance
        recent = sum(one.mono > death.mono - WINDOW_S for one in self.deaths)
        if 0 < ft.node_failures <= recent:
            return f"workers died here {recent} times within {WINDOW_S:g} s (fault_tolerance.node_failures)"
        return ""
