"""The agent of one group on one node: starts its workers, watches them, and decides what their deaths mean.

A group whose rank died is torn down by SIGKILL at once: there is nothing left to save. Each restart is decided by
`watchdog.reason_to_give_up`.
"""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.launch import flight, health, stacks
from everstep.launch.agent import AgentSettings
from everstep.launch.forking import ForkPoint
from everstep.launch.meeting import AskedToStop, Meeting, Round
from everstep.launch.memory import oom_kills
from everstep.launch.progress import CommitWatch, StrikeWatch
from everstep.launch.watchdog import Awake, Death, Stall, describe_exit, find_stall, reason_to_give_up
from everstep.launch.worker import error_path, log_path
from everstep.launch.workers import Ended, Request, Workers
from everstep.run import fence
from everstep.run.beats import DONE, Beat, BeatFile, agent_beat_path, beat_path, push, read_beat
from everstep.run.events import EventLog
from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, USAGE_EXIT
from everstep.run.fence import Claim, Fenced
from everstep.run.files import read_json
from everstep.run.poison import Deaths, Slot, deaths_at, first_to_tell, poisoned, strike, why_at

MONITOR_INTERVAL_S = 0.05
"""How often to look for all but deaths, which are seen at once."""
BEAT_INTERVAL_S = 0.5
PUSH_INTERVAL_S = 1.0
ASK_AGAIN_S = 3.0
"""A worker that was asked to stop is asked again: a signal that comes while it starts is lost to its handler."""
PEER_FAILS_WITHIN_S = 0.1
"""For how long after an exit somebody who died of a signal is still taken for its cause."""
PEER_FAILS_ELSEWHERE_S = 0.5
"""The same for somebody on another node, whose agent has to tell."""
FIRST_STEP_SLACK = 2.0
"""How much longer than the longest one before a first step may take: nothing is in a cache on a new node."""
LONGEST_ERROR = 300
ORDERLY_EXITS = (USAGE_EXIT, HOPELESS_EXIT, UNFIT_EXIT)
"""A trainer's own decisions, which no slot makes for it."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings(AgentSettings):
    """What the agent needs to know besides."""

    argv: list[str]
    """What a worker is called with."""
    first_incarnation: int
    """Of this agent's first workers: earlier agents of the group had the ones before."""
    stopping: Callable[[], bool] = field(default=lambda: False)
    """Whether a clean stop has been asked for."""
    claim: Claim = field(default_factory=Claim)


class GivenUp(Exception):
    """There is no other start: `gave_up` or `node_bad` says why, unless it was asked to stop."""


class GroupAgent:
    """Runs one replica group's workers on this node until they finish, are stopped, or are given up."""

    def __init__(self, settings: GroupSettings, fork_point: ForkPoint, events: EventLog):
        self.settings = settings
        self.gave_up = ""
        self.node_bad = ""
        """Why this node should not be used any more."""
        self.killed_in_the_end = ""
        """Why a stop was not clean."""
        one_node, group = settings.nodes == 1, f"group-{settings.group}"
        self._run_id = f"{group}.{settings.first_incarnation if one_node else settings.claim}"
        self._meeting = Meeting(
            settings.run_dir / "state" / f"{group}.rendezvous.json",
            self._run_id,
            settings.nodes,
            settings.node_rank,
            settings.ranks,
            settings.host,
            settings.stopping,
        )
        self._workers = Workers(fork_point)
        self._round: Round | None = None
        self._events = events
        self._heart = BeatFile(agent_beat_path(settings.run_dir, settings.group))
        self._commits = CommitWatch(settings.run_dir, settings.group)
        self._strikes = StrikeWatch(settings.run_dir, settings.group)
        self._first_step_s: float | None = None
        """The longest time from a start to its first commit so far."""
        self._committed = False
        self._next_look = 0.0
        self._oom_kills = 0
        self._next_beat = 0.0
        self._awake = Awake()
        if settings.node:
            threading.Thread(target=self._push_beats, name="beats", daemon=True).start()
        self._incarnation = settings.first_incarnation - 1
        self._started_mono = 0.0
        self._stop_deadline: float | None = None
        self._ask_again = 0.0
        self._deaths: list[Death] = []
        self._poison_before = self._poison()

    def run(self) -> bool:
        """Until it is over; whether the workers failed. None of them is left then, whatever is raised.

        Raises:
            Fenced: this group was started again elsewhere.
            NodeLost: another node of the group is gone.
            RuntimeError: another agent has to take over.
        """
        try:
            self._start()
            while self._workers.running or not (self._meeting.all_ended() or self._is_overdue()):
                self._workers.wait(MONITOR_INTERVAL_S)
                self._look()
            return False
        except AskedToStop:
            return False
        except GivenUp:
            return True
        finally:
            self._workers.stop()

    def _start(self) -> None:
        """A new incarnation, on all nodes of the group."""
        settings = self.settings
        self._round = None  # the store of the last one
        place = self._round = self._meeting.next_round()
        self._look_at_fence()
        if settings.node and (sick := health.complaint(settings.run_dir)):
            self.node_bad = sick
            raise GivenUp
        self._started_mono = time.monotonic()
        self._committed, self._oom_kills = False, oom_kills()
        self._commits.restart()
        self._strikes.restart()
        self._incarnation += 1
        restarts = self._incarnation - settings.first_incarnation
        requests = []
        for rank in place.ranks:
            error_file = error_path(settings.run_dir, settings.group, rank)
            error_file.unlink(missing_ok=True)
            env = place.environment(rank, f"group-{settings.group}", self._run_id, restarts)
            env["TORCHELASTIC_ERROR_FILE"] = str(error_file)
            env["EVERSTEP_WORKERS_STARTED"] = repr(self._started_mono)
            args = [str(settings.run_dir), settings.group, self._incarnation, settings.entry, settings.argv]
            log = log_path(settings.run_dir, settings.group, rank)
            requests.append(Request(rank, "everstep.launch.worker:start", args, log, env))
        self._workers.start(requests)
        # A group's incarnation is told once, by its first node.
        kind = "workers_started" if settings.node_rank == 0 else "node_workers_started"
        self._events.emit(kind, incarnation=self._incarnation, pids=list(self._workers.pids.values()))

    def _look(self) -> None:
        """What has happened, and what follows from it. Raises GivenUp when nothing does."""
        self._beat()
        stall = None
        if self.settings.stopping():
            self._meeting.beat()
            self._stop_cleanly()
        elif not self._dead() and (stall := self._find_stall()) is not None:
            self._tell_stall(stall)
            self._workers.stop()
        if dead := self._dead():
            hung = [one for one in dead if stall is not None and one.rank == stall.rank]
            first = hung[0] if hung else self._first_death()
            if first.exitcode < 0 and stall is None:
                self._meeting.tell_killed()
            self._workers.stop()
            self._after_death(first, stall)
            self._start()
        elif not self.settings.stopping() and self._meeting.is_awaited():
            self._workers.stop()
            self._start()

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._look_at_fence()
            self._look_at_poison()
            if self.settings.node_rank == 0:
                self._heart.beat("watching")
            self._next_beat = time.monotonic() + BEAT_INTERVAL_S

    def _push_beats(self) -> None:
        """What other hosts read of this group. A thread of its own, since a file server may take its time."""
        run_dir, group = self.settings.run_dir, self.settings.group
        mine = [beat_path(run_dir, group, 0)]
        if self.settings.node_rank == 0:
            mine.append(agent_beat_path(run_dir, group))
        while True:
            push(mine)
            time.sleep(PUSH_INTERVAL_S)

    def _look_at_fence(self) -> None:
        """Raises Fenced when another start of this group has a higher claim."""
        if not fence.holds(self.settings.run_dir, self.settings.group, self.settings.claim):
            raise Fenced(f"group {self.settings.group} was started again elsewhere; this start of it ends")

    def _poison(self) -> dict[Slot, Deaths]:
        """The slots that end the run."""
        return (
            poisoned(self.settings.run_dir, self.settings.groups)
            if self.settings.fault_tolerance.on_poison == "stop"
            else {}
        )

    def _look_at_poison(self) -> None:
        """Ends this group when another one found that a slot ends them all. What was known when this agent began may
        have been put right since."""
        for slot, deaths in self._poison().items():
            if self._poison_before.get(slot) != deaths:
                self._give_up_at(slot)
                raise GivenUp

    def _give_up_at(self, slot: Slot) -> None:
        deaths, why = deaths_at(self.settings.run_dir, slot).deaths, why_at(self.settings.run_dir, slot)
        self.gave_up = (
            f"slot {slot[1]} of step {slot[0]} ended the workers of group(s) {', '.join(map(str, sorted(deaths)))}, "
            f"{deaths.total()} times: {why}. Its data, or what the model makes of it, is at fault; "
            'with [fault_tolerance] on_poison = "skip" a run goes on without it'
        )

    def _stop_cleanly(self) -> None:
        now = time.monotonic()
        if self._stop_deadline is None:
            self._stop_deadline = now + self.settings.stop_grace_s
        if self._is_overdue():
            if self._workers.running:
                self.killed_in_the_end = f"did not end within {self.settings.stop_grace_s:g} s and was killed"
                self._workers.stop()
        elif now >= self._ask_again:
            self._ask_again = now + ASK_AGAIN_S
            self._workers.signal(signal.SIGTERM, [rank for rank in self._workers.running if not self._is_done(rank)])

    def _is_overdue(self) -> bool:
        """Whether a clean stop has taken as long as it may."""
        return self._stop_deadline is not None and time.monotonic() > self._stop_deadline

    def _is_done(self, rank: int) -> bool:
        beat = read_beat(beat_path(self.settings.run_dir, self.settings.group, rank))
        return beat is not None and beat.pid == self._workers.pids[rank] and beat.phase == DONE

    def _dead(self) -> list[Ended]:
        """Those that ended before they had done their work, be it with status 0, in the order of their deaths."""
        return [one for one in self._workers.ended if one.exitcode != 0 or not self._is_done(one.rank)]

    def _first_death(self) -> Ended:
        """The one that brought the group down. Whom a signal killed takes a while to give its memory back, during which
        a peer may notice and fail."""
        deadline = time.monotonic() + PEER_FAILS_WITHIN_S
        while True:
            first = min(self._dead(), key=lambda one: one.exitcode >= 0)
            left_s = deadline - time.monotonic()
            if first.exitcode < 0 or not self._workers.running or left_s <= 0:
                return first
            self._workers.wait(left_s)

    def _has_committed(self) -> bool:
        """Whether these workers have committed a step. Looks twice a second at most, and no more once they have."""
        now = time.monotonic()
        if not self._committed and now >= self._next_look:
            self._next_look = now + BEAT_INTERVAL_S
            self._committed = self._commits.seen()
            if self._committed:
                self._first_step_s = max(self._first_step_s or 0.0, now - self._started_mono)
        return self._committed

    def _first_step_patience(self) -> float | None:
        """How long a phase of the first step may last, in seconds; None once it has been made."""
        if self._has_committed():
            return None
        startup_s = self.settings.fault_tolerance.startup_timeout_s
        return startup_s if self._first_step_s is None else min(startup_s, FIRST_STEP_SLACK * self._first_step_s)

    def _find_stall(self) -> Stall | None:
        awake_mono = self._awake.since()
        if not self.settings.fault_tolerance.enable:
            return None
        pids = self._workers.pids
        return find_stall(
            pids,
            {rank: read_beat(beat_path(self.settings.run_dir, self.settings.group, rank)) for rank in pids},
            self._started_mono,
            time.monotonic(),
            self.settings.fault_tolerance.stall_timeout_s,
            self.settings.fault_tolerance.startup_timeout_s,
            self._first_step_patience(),
            awake_mono,
        )

    def _tell_stall(self, stall: Stall) -> None:
        self._events.emit(
            "workers_stalled",
            incarnation=self._incarnation,
            phase=stall.phase,
            idle_s=stall.idle_s,
            stalled_rank=stall.rank,
        )
        self._tell_stacks()

    def _tell_stacks(self) -> None:
        """Where each rank hangs, before all are killed."""
        settings = self.settings
        places = stacks.collect(settings.run_dir, settings.group, self._workers.pids)
        dumps = {rank: flight.dump_path(settings.run_dir, settings.group, rank) for rank in self._workers.pids}
        waits = flight.waits({rank: flight.entries_of(path) for rank, path in dumps.items()})
        files = [stacks.stacks_path(settings.run_dir, settings.group, one.rank) for one in places if not one.state]
        files += [path for path in dumps.values() if path.exists()]
        self._events.emit(
            "workers_stacks",
            incarnation=self._incarnation,
            summary="; ".join([*waits, stacks.summary(places)]),
            ranks={str(place.rank): str(place) for place in places},
            files=[str(path.relative_to(settings.run_dir)) for path in files],
        )

    def _after_death(self, first: Ended, stall: Stall | None) -> None:
        """Tell how the workers ended, `first` before the others, and count it. Raises GivenUp when they are not to be
        started again."""
        self._next_look = 0.0
        ran_s = time.monotonic() - self._started_mono
        stalled = stall is not None
        peer_killed = first.exitcode > 0 and self._meeting.others_were_killed(PEER_FAILS_ELSEWHERE_S)
        others_struck, struck = self._strikes.struck()
        error, traceback = self._error_of(first)
        death = Death(
            mono=time.monotonic(),
            exitcode=first.exitcode,
            committed=self._has_committed()
            if self.settings.fault_tolerance.enable
            else ran_s > self.settings.fault_tolerance.startup_timeout_s,
            error=error,
            excused=others_struck or peer_killed or (struck and (stalled or first.exitcode < 0)),
            stalled=stalled,
            out_of_memory=first.exitcode == -signal.SIGKILL and not stalled and oom_kills() > self._oom_kills,
        )
        self._deaths.append(death)
        reason = why(first.rank, death, stall)
        print(f"incarnation {self._incarnation}: {reason}\n{traceback}".strip(), flush=True)
        place = self._slot_of(first)
        slot = (place.step, place.slot) if place is not None else None
        poison = slot is not None and death.crashed and not struck and self._strike(slot, death, reason)
        self._events.emit(
            "workers_died",
            incarnation=self._incarnation,
            reason=reason,
            error=death.error,
            committed=death.committed,
            by_itself=death.by_itself,
            at_step=slot[0] if slot is not None else None,
            at_slot=slot[1] if slot is not None else None,
            exitcodes={str(first.rank): first.exitcode},
        )
        if self.settings.stopping():
            # A worker that has not begun yet has nothing to finish: SIGTERM just ends it.
            if first.exitcode != -signal.SIGTERM and not self.killed_in_the_end:
                self.killed_in_the_end = reason
            raise GivenUp
        if self.settings.node and (bad := self._reason_to_move(first.exitcode)):
            self.node_bad = f"{bad}; last: {reason}"
            raise GivenUp
        if slot is not None and poison:
            # The next start does without it, or there is none.
            self._deaths.pop()
            if self.settings.fault_tolerance.on_poison == "stop":
                self._give_up_at(slot)
                raise GivenUp
        elif (give_up := reason_to_give_up(self._deaths, self.settings.limits)) is not None:
            self.gave_up = f"group {self.settings.group} is given up, {give_up}; last: {reason}"
            raise GivenUp

    def _error_of(self, one: Ended) -> tuple[str, str]:
        """The first line and the traceback of the exception that a rank ended with; "" if there was none."""
        if one.exitcode <= 0:
            return "", ""
        message = read_json(error_path(self.settings.run_dir, self.settings.group, one.rank)).get("message", "")
        if not isinstance(message, dict):
            return first_line(str(message)), ""
        return first_line(str(message.get("message", ""))), str(message.get("extraInfo", {}).get("py_callstack", ""))

    def _strike(self, slot: Slot, death: Death, reason: str) -> bool:
        """Workers ended at this slot of their own doing: whether it is poison by now, which whoever finds it says."""
        run_dir, group, groups = self.settings.run_dir, self.settings.group, self.settings.groups
        if death.exitcode in ORDERLY_EXITS:
            return False
        try:
            strike(run_dir, slot, group, self._incarnation, worked=death.committed, why=death.error or reason)
        except OSError as error:  # a full disk must not keep the group from starting again
            print(f"slot {slot[1]} of step {slot[0]} is not noted as this death's: {error}")
            return False
        now = deaths_at(run_dir, slot)
        if now.poisoned(groups) and first_to_tell(run_dir, slot):
            step, number = slot
            self._events.emit(
                "poison_slot",
                step,
                slot=number,
                groups=sorted(now.deaths),
                error=death.error or reason,
                action=self.settings.fault_tolerance.on_poison,
            )
        return now.poisoned(groups)

    def _slot_of(self, one: Ended) -> Beat | None:
        """The step and slot that a rank computed when it died; None: it computed none."""
        beat = read_beat(beat_path(self.settings.run_dir, self.settings.group, one.rank))
        return beat if beat is not None and beat.pid == one.pid and beat.phase == "compute" and beat.slot >= 0 else None

    def _reason_to_move(self, exitcode: int) -> str | None:
        """Why the group should go on without this node."""
        if exitcode == UNFIT_EXIT:
            return "its arithmetic was wrong twice in the same place"
        window_s, now = self.settings.limits.window_s, time.monotonic()
        recent = sum(death.mono > now - window_s for death in self._deaths)
        if 0 < self.settings.fault_tolerance.node_failures <= recent:
            return f"workers died here {recent} times within {window_s:g} s (fault_tolerance.node_failures)"
        return None


def why(rank: int, death: Death, stall: Stall | None) -> str:
    """How the workers ended, in one sentence."""
    if stall is not None:
        return f"rank {stall.rank} stalled in {stall.phase} for {stall.idle_s:.1f} s"
    sentence = f"rank {rank} {describe_exit(death.exitcode)}"
    if death.out_of_memory:
        sentence += ", by the kernel: the memory of its control group was used up"
    return f"{sentence}: {death.error}" if death.error else sentence


def first_line(message: str) -> str:
    """What an error begins with: `KeyError: 'x'`."""
    lines = message.strip().splitlines()
    return lines[0][:LONGEST_ERROR] if lines else ""
