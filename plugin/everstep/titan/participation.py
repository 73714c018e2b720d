"""Connects one rank's trainer to the step protocol, and decides when the other groups begin to wait for its group."""

import os
import time
import uuid
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from everstep.config.sections import FaultTolerance
from everstep.quorum.heal import StateServer
from everstep.quorum.membership import Membership
from everstep.quorum.process_group import RankColumn
from everstep.quorum.ranks import GroupRanks
from everstep.run.address import published_address
from everstep.snapshot.segment import run_id
from everstep.step.attempt import Group, Host, Outcome, Rules
from everstep.step.decisions import Decisions
from everstep.step.driver import Driver
from everstep.step.interfaces import Timeouts
from everstep.step.ledger import Dealing
from everstep.step.protocol import StepProtocol
from everstep.titan.rounds import Rounds
from everstep.titan.steps import Steps

OF_STALL = 0.8
"""Longest wait for other groups, as a part of `stall_timeout_s`, after which this rank would be killed as stalled."""
HEAL_SUMS = 3.0
"""Longest silence of a heal's source, in multiples of `reduce_timeout_s`: it may be silent while it computes."""
GIVE_UP_STARTS = 4.0
"""Time without a commit after which a group gives up, in multiples of `startup_timeout_s`: others may be starting."""


class Participation:
    """One rank's connections to the other ranks and groups; `run` makes steps with them.

    Args:
        trainer: an `EverstepTrainer` that has set `context` and `streams`.
    """

    def __init__(self, trainer: Any) -> None:
        self._config, self._context = config, run = trainer.config, trainer.context
        ft: FaultTolerance = config.fault_tolerance
        self._ft = ft
        self._ranks = GroupRanks(timedelta(seconds=ft.quorum_timeout_s + ft.stall_timeout_s))
        self.life: str = Decisions(self._ranks).gather("life", uuid.uuid4().hex)[0]
        """Identifier of this start of the group: new at every start, the same on all its ranks."""
        parallel = asdict(config.parallelism).items()
        self._degrees = tuple(f"{key} = {value}" for key, value in parallel if key.endswith("degree"))
        self._data = f"data = {trainer.slots.source.fingerprint()}"
        rank = f"rank {self._ranks.rank} of {self._ranks.size}"
        self.whose = f"{rank} in run {run_id(run.token)}, {', '.join(self._degrees)}"
        """Describes whose state this rank has: rank, run and parallelism. Only ranks with an equal one heal from it."""
        self.server = StateServer(run.host, run.token, timedelta(seconds=HEAL_SUMS * ft.reduce_timeout_s), self.whose)
        self.column = RankColumn(
            ft.process_group,
            column=self._ranks.rank,
            host=run.host,
            connect_timeout=timedelta(seconds=ft.connect_timeout_s),
            token=run.token,
            streams=trainer.streams,
        )
        self._store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._membership: Membership | None = None

    def warm(self) -> None:
        """Load what the sums over groups need (NCCL's kernels, for instance), before other groups wait for this one."""
        self.column.warm(self._store, timedelta(seconds=self._ft.startup_timeout_s))

    def run(self, work: Steps | Rounds) -> Outcome:
        """Announce this group at the lighthouse and make steps until the run is over or the group leaves. Return how it
        ended (see `Driver.run`). Once the group is announced, every quorum waits for it."""
        ft, semi, run = self._ft, self._config.semi_sync, self._context
        if self._ranks.rank == 0:
            self._membership = Membership(
                group=ft.group_id,
                life=self.life,
                token=run.token,
                find_lighthouse=lambda: published_address(run.run_dir) or ft.lighthouse,
                fenced=run.files.fenced,
                heartbeat_timeout_s=ft.heartbeat_timeout_s,
            )
        give_up = timedelta(seconds=GIVE_UP_STARTS * ft.startup_timeout_s)
        longest_s = OF_STALL * ft.stall_timeout_s
        # Groups that began a semi-synchronous round together may end it at more different times than a step.
        sum_s = max(ft.reduce_timeout_s, longest_s) if semi.enabled else ft.reduce_timeout_s
        timeouts = Timeouts(
            quorum=timedelta(seconds=ft.quorum_timeout_s),
            reduce=timedelta(seconds=sum_s),
            compute=timedelta(seconds=longest_s),
            join=timedelta(seconds=ft.join_timeout_s),
            pause=timedelta(seconds=ft.heartbeat_timeout_s),
            give_up=give_up,
        )
        clock: Any = SimpleNamespace(now=time.monotonic, sleep=time.sleep)
        host = Host(clock, run.files, run.events)
        protocol = StepProtocol(
            group=Group(ft.group_id, self.life, self._store, self._ranks, self._membership, self.column, self.server),
            rules=Rules(
                work.shares,
                Dealing(ft.on_loss, ft.groups if semi.enabled else 0, ft.groups, ft.spares),
                timeouts,
                audit_slots=ft.audit_slots,
                seed=self._config.debug.seed or 0,
                more=(f"process_group = {ft.process_group}", f"exact = {ft.exact}", self._data, *self._degrees),
            ),
            work=work,
            reducer=work.reducer,
            host=host,
        )
        return Driver(protocol, work, host, give_up).run()

    def leave(self) -> None:
        """End heartbeats and transfers of state, so that the other groups go on without this one."""
        if self._membership is not None:
            self._membership.leave()
        self.server.shutdown()
