"""The two ends of a connection to the lighthouse, around the real code: a lighthouse's gate, and a group's voice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from everstep.quorum.request import Request
from simulation import real
from simulation.lighthouse import Options
from simulation.scheduler import Process

if TYPE_CHECKING:
    from simulation.groups import Rank
    from simulation.world import World

TOKEN = bytes(range(32))
PORT = 29510
VOTE_S = 5.0
"""Seconds for which a group that shall ask while others vote waits for a vote."""
NEVER = float("inf")


class LighthouseNode:
    """A lighthouse behind its gate, on its own host."""

    def __init__(self, world: World, host: str, options: Options) -> None:
        self.world, self.host, self.options = world, host, options
        self.address = f"http://{host}:{PORT}"
        self.start()

    def start(self) -> None:
        """Start the lighthouse. If it was killed, it has forgotten everything."""
        self.process = Process(self.world.scheduler, self.host, self.host)
        self.process.on_death.append(partial(self.world.network.process_died, self.process))
        self.world.scheduler.spawn(self.process, self._serve)

    def _serve(self) -> None:
        options = self.options
        waits_s, groups = (options.join_timeout_s, options.heartbeat_timeout_s), self.world.plan.groups
        rules = real.gate.QuorumRules(options.min_replicas, *waits_s, groups)
        real.gate.Gate(TOKEN, (self.host, PORT), rules, lambda count, last: None)


class Voice:
    """A group's membership, which reports its quorums to the judge."""

    def __init__(self, world: World, rank: Rank, fenced: Callable[[], bool]) -> None:
        self._world, self._rank, self._life = world, rank, rank.life
        self._membership = real.membership.Membership(
            group=rank.life.group.id,
            life=rank.life.name,
            token=TOKEN,
            find_lighthouse=lambda: world.address.read(world.seen_at(rank.life.host)),
            fenced=fenced,
            heartbeat_timeout_s=world.plan.lighthouse.heartbeat_timeout_s,
        )
        self.leave: Callable[[], None] = self._membership.leave

    @property
    def wanted(self) -> bool:
        return self._membership.wanted

    def ask(self, request: Request, timeout: timedelta) -> tuple[int, list[Request]]:
        life, world = self._life, self._world
        world.judge_silence(self._rank, "asks for a quorum")
        if life.asks_at_vote:
            life.asks_at_vote, votes = False, world.votes
            world.scheduler.wait(world.voted, lambda: world.votes > votes, VOTE_S)
        life.asks_since = world.scheduler.now
        try:
            number, members = self._membership.ask(request, timeout)
        finally:
            life.asks_since = NEVER
        world.judge_question(life, request, members)
        return number, members
