"""TorchElastic, fitted to one replica group. With `rendezvous`, the only file here that imports torch.

What is different from `elastic_launch`: a group whose rank died is torn down by SIGKILL at once (there is
nothing left to save, and 30 s of grace would be 30 s less training); a watchdog runs with every poll; a
clean stop lets the workers finish their step; each restart is decided by `watchdog.reason_to_give_up`; the
rendezvous store listens on one address.
"""

import dataclasses
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler

from everstep.foreign import overrides
from everstep.launch import flight, health, private, stacks, worker
from everstep.launch.agent import AgentSettings
from everstep.launch.memory import oom_kills
from everstep.launch.progress import CommitWatch, StrikeWatch
from everstep.launch.rendezvous import OneNodeRendezvous, RunDirRendezvous
from everstep.launch.watchdog import Death, Stall, describe_exit, find_stall, reason_to_give_up
from everstep.run import fence
from everstep.run.beats import DONE, Beat, BeatFile, agent_beat_path, beat_path, push, read_beat
from everstep.run.events import EventLog
from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, USAGE_EXIT
from everstep.run.fence import Claim, Fenced
from everstep.run.poison import Deaths, Slot, deaths_at, first_to_tell, poisoned, strike, why_at

MONITOR_INTERVAL_S = 0.05
BEAT_INTERVAL_S = 0.5
PUSH_INTERVAL_S = 1.0
ASK_AGAIN_S = 3.0
"""A worker that was asked to stop is asked again: a signal that comes while it starts is lost to its handler."""
FIRST_STEP_SLACK = 2.0
"""How much longer than the longest one before a first step may take: nothing is in a cache on a new node."""
LONGEST_ERROR = 300
ORDERLY_EXITS = (USAGE_EXIT, HOPELESS_EXIT, UNFIT_EXIT)
"""A trainer's own decisions, which no slot makes for it."""
NO_ERROR_FILE = "<N/A>"  # TorchElastic's word for a worker that left no error file
UNLIMITED_RESTARTS = 2**31 - 1  # TorchElastic's own counter never decides: reason_to_give_up does


class OneFilePerRank(LogsSpecs):
    """Workers open their own log (`worker.log_path`); here they get the error file and the time they were
    asked for.
    """

    def __init__(self, folder: Path):
        super().__init__(log_dir=str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._folder.mkdir(parents=True, exist_ok=True)
        error_files = {}
        for local_rank, env in envs.items():
            error_file = self._folder / f"rank-{env['RANK']}.error.json"
            error_file.unlink(missing_ok=True)
            env["TORCHELASTIC_ERROR_FILE"] = error_files[local_rank] = str(error_file)
            env["EVERSTEP_WORKERS_STARTED"] = repr(time.monotonic())
        console = dict.fromkeys(envs, "")
        return LogsDest(stdouts=dict(console), stderrs=dict(console), error_files=error_files)


@dataclass(frozen=True, kw_only=True)
class GroupSettings(AgentSettings):
    """What an elastic agent needs to know besides."""

    argv: list[str]
    """What a worker is called with."""
    fork_point_pid: int
    first_incarnation: int
    stopping: Callable[[], bool] = field(default=lambda: False)
    """Whether a clean stop has been asked for."""
    claim: Claim = field(default_factory=Claim)


class GroupAgent(LocalElasticAgent):
    """Runs one replica group's workers until they finish, are stopped, or are given up."""

    def __init__(self, settings: GroupSettings, events: EventLog):
        place = worker.Place(
            settings.run_dir,
            settings.group,
            settings.fork_point_pid,
            settings.first_incarnation,
            settings.entry,
        )
        spec = WorkerSpec(
            role=f"group-{settings.group}",
            local_world_size=settings.ranks,
            entrypoint=worker.start,
            args=(place, settings.argv),
            rdzv_handler=_rendezvous(settings),
            max_restarts=UNLIMITED_RESTARTS,
            monitor_interval=MONITOR_INTERVAL_S,
        )
        logs = OneFilePerRank(worker.log_path(settings.run_dir, settings.group, 0).parent)
        super().__init__(spec, logs, start_method="forkserver", exit_barrier_timeout=5)
        self.settings = settings
        self.gave_up = ""
        self.node_bad = ""
        """Why this node should not be used any more."""
        self.killed_in_the_end = ""
        """Why a stop was not clean."""
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
        if settings.node:
            threading.Thread(target=self._push_beats, name="beats", daemon=True).start()
        self._incarnation = settings.first_incarnation - 1
        self._starts = 0
        self._pids: dict[int, int] = {}
        self._died_by_themselves: list[int] = []
        self._started_mono = 0.0
        self._stop_deadline: float | None = None
        self._ask_again = 0.0
        self._stall: Stall | None = None
        self._deaths: list[Death] = []
        self._poison_before = self._poison()

    @overrides(LocalElasticAgent)
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        if _is_gone(self.settings.fork_point_pid):
            raise RuntimeError("the fork point of this agent has died; a new agent has to take over")
        self._look_at_fence()
        if self.settings.node and (sick := health.complaint(self.settings.run_dir)):
            self.node_bad = sick
            raise RuntimeError(f"this node is not fit to train on: {sick}")
        self._started_mono = time.monotonic()
        self._stall = None
        self._committed, self._oom_kills = False, oom_kills()
        self._commits.restart()
        self._strikes.restart()
        # Workers tell their incarnations apart by TorchElastic's count, which on several nodes is each node's own.
        private.set_restarts_left(self, UNLIMITED_RESTARTS - self._starts)
        self._starts += 1
        local = super()._start_workers(worker_group)
        for process in private.processes(self):
            # A death that TorchElastic sees before we do would make it ask the others to stop, and wait 30 s for that.
            process.terminate = process.kill
        self._pids = {worker_group.workers[local_rank].global_rank: pid for local_rank, pid in local.items()}
        self._died_by_themselves = []
        self._incarnation += 1
        # A group's incarnation is told once, by its first node.
        kind = "workers_started" if self.settings.node_rank == 0 else "node_workers_started"
        self._events.emit(kind, incarnation=self._incarnation, pids=list(self._pids.values()))
        return local

    @overrides(LocalElasticAgent)
    def _exit_barrier(self) -> None:
        self.get_worker_group().spec.rdzv_handler.shutdown()
        super()._exit_barrier()

    @overrides(LocalElasticAgent)
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._kill_workers()
        processes = private.processes(self)
        super()._stop_workers(worker_group)
        for process in processes:
            # Each refers to itself by it, and would keep its pipes for as long as the garbage collector likes.
            vars(process).pop("terminate", None)

    @overrides(LocalElasticAgent)
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._beat()
        if self.settings.stopping():
            self._stop_cleanly()
        elif self._some_worker_died() or self._stalled():
            self._kill_workers()
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._after_death(result)
        return result

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
        """Raises Fenced, with the workers killed, when another start of this group has a higher claim."""
        if not fence.holds(self.settings.run_dir, self.settings.group, self.settings.claim):
            self._kill_workers()
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
                self._kill_workers()
                raise RuntimeError(self.gave_up)

    def _give_up_at(self, slot: Slot) -> None:
        deaths, why = deaths_at(self.settings.run_dir, slot).deaths, why_at(self.settings.run_dir, slot)
        self.gave_up = (
            f"slot {slot[1]} of step {slot[0]} ended the workers of group(s) {', '.join(map(str, sorted(deaths)))}, "
            f"{deaths.total()} times: {why}. Its data, or what the model makes of it, is at fault; "
            'with [fault_tolerance] on_poison = "skip" a run goes on without it'
        )

    def _stop_cleanly(self) -> None:
        now = time.monotonic()
        private.set_restarts_left(self, 0)
        if self._stop_deadline is None:
            self._stop_deadline = now + self.settings.stop_grace_s
        if now > self._stop_deadline:
            self.killed_in_the_end = f"did not end within {self.settings.stop_grace_s:g} s and was killed"
            self._kill_workers()
        elif now >= self._ask_again:
            self._ask_again = now + ASK_AGAIN_S
            self._signal_workers(signal.SIGTERM, [pid for rank, pid in self._pids.items() if not self._is_done(rank)])

    def _is_done(self, rank: int) -> bool:
        beat = read_beat(beat_path(self.settings.run_dir, self.settings.group, rank))
        return beat is not None and beat.pid == self._pids[rank] and beat.phase == DONE

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

    def _some_worker_died(self) -> bool:
        """A worker that finished waits for the agent, so one that is gone before all have finished has
        died.
        """
        if not self._died_by_themselves:
            self._died_by_themselves = [rank for rank, pid in self._pids.items() if _is_gone(pid)]
        return bool(self._died_by_themselves)

    def _stalled(self) -> bool:
        if self._stall is not None:
            return True  # said already; the kernel is still taking the workers down
        if not self.settings.fault_tolerance.enable:
            return False
        folder = self.settings.run_dir
        beats = {rank: read_beat(beat_path(folder, self.settings.group, rank)) for rank in self._pids}
        self._stall = find_stall(
            self._pids,
            beats,
            self._started_mono,
            time.monotonic(),
            self.settings.fault_tolerance.stall_timeout_s,
            self.settings.fault_tolerance.startup_timeout_s,
            self._first_step_patience(),
        )
        if self._stall is not None:
            self._events.emit(
                "workers_stalled",
                incarnation=self._incarnation,
                phase=self._stall.phase,
                idle_s=self._stall.idle_s,
                stalled_rank=self._stall.rank,
            )
            self._tell_stacks()
        return self._stall is not None

    def _tell_stacks(self) -> None:
        """Where each rank hangs, before all are killed."""
        settings = self.settings
        places = stacks.collect(settings.run_dir, settings.group, self._pids)
        dumps = {rank: flight.dump_path(settings.run_dir, settings.group, rank) for rank in self._pids}
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

    def _after_death(self, result: RunResult) -> None:
        rank, failure = self._first_death(result)
        self._next_look = 0.0
        ran_s = time.monotonic() - self._started_mono
        others_struck, struck = self._strikes.struck()
        stalled = self._stall is not None
        death = Death(
            mono=time.monotonic(),
            exitcode=failure.exitcode,
            committed=self._has_committed()
            if self.settings.fault_tolerance.enable
            else ran_s > self.settings.fault_tolerance.startup_timeout_s,
            error=first_line(failure.message) if failure.exitcode > 0 and failure.error_file != NO_ERROR_FILE else "",
            excused=others_struck or (struck and (stalled or failure.exitcode < 0)),
            stalled=stalled,
            out_of_memory=failure.exitcode == -signal.SIGKILL and not stalled and oom_kills() > self._oom_kills,
        )
        self._deaths.append(death)
        reason = self._why(rank, death)
        place = self._slot_of(rank, failure.pid)
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
            exitcodes={str(rank): failure.exitcode for rank, failure in result.failures.items()},
        )
        if self.settings.stopping():
            # A worker that has not begun yet has nothing to finish: SIGTERM just ends it.
            if failure.exitcode != -signal.SIGTERM and not self.killed_in_the_end:
                self.killed_in_the_end = reason
        elif self.settings.node and (bad := self._reason_to_move(failure.exitcode)):
            self.node_bad = f"{bad}; last: {reason}"
            private.set_restarts_left(self, 0)
        elif slot is not None and poison:
            # The next start does without it, or there is none.
            self._deaths.pop()
            if self.settings.fault_tolerance.on_poison == "stop":
                self._give_up_at(slot)
                private.set_restarts_left(self, 0)
        else:
            give_up = reason_to_give_up(self._deaths, self.settings.limits)
            if give_up is not None:
                self.gave_up = f"group {self.settings.group} is given up, {give_up}; last: {reason}"
                private.set_restarts_left(self, 0)

    def _strike(self, slot: Slot, death: Death, reason: str) -> bool:
        """Workers ended at this slot of their own doing: whether it is poison by now, which whoever finds it says."""
        run_dir, group, groups = self.settings.run_dir, self.settings.group, self.settings.groups
        if death.exitcode in ORDERLY_EXITS:
            return False
        strike(run_dir, slot, group, self._incarnation, worked=death.committed, why=death.error or reason)
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

    def _slot_of(self, rank: int, pid: int) -> Beat | None:
        """The step and slot that a rank computed when it died; None: it computed none."""
        beat = read_beat(beat_path(self.settings.run_dir, self.settings.group, rank))
        return beat if beat is not None and beat.pid == pid and beat.phase == "compute" and beat.slot >= 0 else None

    def _why(self, rank: int, death: Death) -> str:
        """How the workers ended, in one sentence."""
        if self._stall is not None:
            return f"rank {self._stall.rank} stalled in {self._stall.phase} for {self._stall.idle_s:.1f} s"
        why = f"rank {rank} {describe_exit(death.exitcode)}"
        if death.out_of_memory:
            why += ", by the kernel: the memory of its control group was used up"
        return f"{why}: {death.error}" if death.error else why

    def _reason_to_move(self, exitcode: int) -> str | None:
        """Why the group should go on without this node."""
        if exitcode == UNFIT_EXIT:
            return "its arithmetic was wrong twice in the same place"
        window_s, now = self.settings.limits.window_s, time.monotonic()
        recent = sum(death.mono > now - window_s for death in self._deaths)
        if 0 < self.settings.fault_tolerance.node_failures <= recent:
            return f"workers died here {recent} times within {window_s:g} s (fault_tolerance.node_failures)"
        return None

    def _first_death(self, result: RunResult) -> tuple[int, ProcessFailure]:
        """The rank that brought its group down. TorchElastic names one of the dead: perhaps a peer that had
        time to fail at the death of the first, so a rank that a signal killed, other than ours, goes first.
        """
        rank, failure = min(result.failures.items())
        by_pid = {process.pid: process.exitcode for process in private.processes(self)}
        for other in self._died_by_themselves:
            exitcode = by_pid.get(self._pids[other])
            ours = rank not in self._died_by_themselves  # killed by us, when we saw the other one gone
            if exitcode is not None and (ours or (failure.exitcode >= 0 and exitcode < 0)):
                told = result.failures.get(other)
                return other, told or dataclasses.replace(failure, pid=self._pids[other], exitcode=exitcode)
        return rank, failure

    def _signal_workers(self, signum: signal.Signals, pids: Iterable[int] | None = None) -> None:
        for pid in self._pids.values() if pids is None else pids:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue

    def _kill_workers(self) -> None:
        self._signal_workers(signal.SIGKILL)


def _rendezvous(settings: GroupSettings) -> RendezvousHandler:
    if settings.nodes == 1:
        return OneNodeRendezvous(f"group-{settings.group}.{settings.first_incarnation}", settings.host)
    meeting = settings.run_dir / "state" / f"group-{settings.group}.rendezvous.json"
    claim = f"group-{settings.group}.{settings.claim}"
    return RunDirRendezvous(
        meeting, claim, settings.nodes, settings.node_rank, settings.host, lambda: settings.stopping()
    )


def first_line(message: str | dict) -> str:
    """What a worker's error file begins with: `KeyError: 'x'`."""
    text = message.get("message", "") if isinstance(message, dict) else message
    lines = text.strip().splitlines()
    return lines[0][:LONGEST_ERROR] if lines else ""


def _is_gone(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()  # unlike select(), with descriptors over 1023 as well
        ended.register(fd, select.POLLIN)
        return bool(ended.poll(0))
    finally:
        os.close(fd)
