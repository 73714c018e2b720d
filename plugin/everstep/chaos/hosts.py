"""Faults of what keeps a run up: agents, keepers, whole hosts, the lighthouse, the launcher."""

import random
from dataclasses import dataclass
from signal import SIGKILL, SIGSTOP

from everstep.chaos import launcher
from everstep.chaos.fault import Fault, Injection
from everstep.chaos.processes import HEALS
from everstep.chaos.storage import own_segments
from everstep.chaos.target import Target
from everstep.chaos.view import View


class KillAgent(Fault):
    name = "kill-agent"
    breaks = "SIGKILL to a group's agent; the kernel takes its workers with it. On Slurm: SIGKILL to the group's step."
    undone = "An instant."
    expected = f"The supervisor (on Slurm the requeued job) starts another agent; {HEALS}."

    def why_not(self, run: View) -> str | None:
        if self.group is not None and run.agent(self.group) is None:
            return f"group {self.group} has no agent"
        return super().why_not(run)

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group = self.victim(target.run, choose)
        agent = target.run.agent(group)
        return Injection(
            strike=lambda: target.kill_agent(group),
            target_group=group,
            pids=[agent.pid] if agent else [],
        )


class KillKeeper(Fault):
    name = "kill-keeper"
    breaks = "SIGKILL to the process that holds a group's snapshots. Its shared memory stays."
    undone = "An instant."
    expected = (
        "Training notices nothing. A trainer whose keeper is silent starts another one, which adopts the memory; until "
        "then the group's snapshots are not coded."
    )

    def never(self, run: View) -> str | None:
        return None if run.takes_snapshots else "it takes no snapshots (snapshot.enable)"

    def why_not(self, run: View) -> str | None:
        return None if self._groups(run) else "no keeper lives that may be hit"

    def _groups(self, run: View) -> list[int]:
        mine = run.group_ids if self.group is None else [self.group]
        return [group for group in mine if group not in run.spared and run.keepers(group)]

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group = choose.choice(self._groups(target.run))
        keepers = target.keepers(group)
        # The group itself is not hit: it goes on taking part.
        return Injection(
            strike=lambda: target.signal(keepers, SIGKILL),
            pids=[keeper.pid for keeper in keepers],
            fields={"keeper_of": group},
        )


class KillHost(Fault):
    name = "kill-host"
    breaks = "Agent, workers and keeper of a group are killed, and the memory of its snapshots is lost: a host dies."
    undone = "An instant."
    expected = f"As kill-agent: {HEALS}. Its new keeper starts empty; what it held is decoded from the others' parity."
    on = frozenset({"local"})

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group = self.victim(target.run, choose)
        agent, keepers = target.run.agent(group), target.keepers(group)
        segments = own_segments(target.run_dir, target.run.keepers(group))

        def strike() -> None:
            target.kill_agent(group)
            target.signal(keepers, SIGKILL)
            for segment in segments:
                segment.remove()

        pids = [agent.pid] if agent else []
        return Injection(strike=strike, target_group=group, pids=pids + [keeper.pid for keeper in keepers])


class KillLighthouse(Fault):
    name = "kill-lighthouse"
    breaks = "SIGKILL to the lighthouse."
    undone = "An instant."
    expected = "It is started again at the same address; no group dies, and no step is tried twice."
    signum = SIGKILL

    def why_not(self, run: View) -> str | None:
        return None if run.lighthouse else "there is no lighthouse now"

    def plan(self, target: Target, choose: random.Random) -> Injection:
        lighthouse = target.run.lighthouse
        procs = [lighthouse] if lighthouse else []
        undo = target.go_on_later(procs) if self.signum == SIGSTOP else None
        return Injection(strike=lambda: target.signal(procs, self.signum), pids=[p.pid for p in procs], undo=undo)


@dataclass(kw_only=True)
class StopLighthouse(KillLighthouse):
    name = "stop-lighthouse"
    breaks = "SIGSTOP to the lighthouse: it takes connections and answers nothing, as behind a broken network."
    undone = "SIGCONT after duration_s, or whoever runs it replaces it before that."
    expected = "No quorum forms until it answers or is replaced; nothing is lost."
    signum = SIGSTOP

    duration_s: float = 8.0


@dataclass(kw_only=True)
class KillLauncher(Fault):
    name = "kill-launcher"
    breaks = "SIGKILL to the supervisor (`everstep run`); the kernel takes everything below it, but for the keepers."
    undone = "After duration_s the same command is started again in the same run directory, as a person would."
    expected = (
        "The run goes on from the newest snapshot in the keepers, or without snapshots from its checkpoint on disk, or "
        "without either from the first step."
    )
    on = frozenset({"local"})

    duration_s: float = 2.0

    def never(self, run: View) -> str | None:
        return "it hits every group, and some are spared" if run.spared else None

    def why_not(self, run: View) -> str | None:
        return None if run.taking_part else "no group takes part"

    def plan(self, target: Target, choose: random.Random) -> Injection:
        proc = target.launcher()
        procs = [proc] if proc else []
        return Injection(
            strike=lambda: target.signal(procs, SIGKILL),
            target_group=target.run.group_ids,
            pids=[proc.pid for proc in procs],
            undo=launcher.to_start_again(proc.pid, target.run_dir) if proc else None,
        )


KINDS = (KillAgent, KillKeeper, KillHost, KillLighthouse, StopLighthouse, KillLauncher)
