"""One rank of a group of a small run: the real protocol, driver, lighthouse, process groups and healing, with a model
of four numbers.

Run by `harness.Run`, one process a rank. The "gradient" of (step, slot) is a known vector, so a test can say exactly
what the state after any step must be, whoever computed what. Faults are placed by options and by small files in the
run directory, through other doors than the protocol's own.
"""

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from everstep.quorum.gate import Gate
from everstep.quorum.gate import Rules as GateRules
from everstep.quorum.heal import Door, HealState
from everstep.quorum.interface import use_interface
from everstep.quorum.membership import Membership
from everstep.quorum.process_group import RankColumn
from everstep.quorum.ranks import GroupRanks
from everstep.run.events import EventLog
from everstep.step import ledger
from everstep.step.attempt import Group, Host, Rules
from everstep.step.decisions import Decisions
from everstep.step.driver import Driver
from everstep.step.interfaces import Commit, SlotSums, Timeouts
from everstep.step.protocol import StepProtocol
from everstep.step.reduction import GradientReducer
from everstep.titan.run_files import RankFiles
from switch import enter

TOKEN = b"t" * 32


@dataclass(frozen=True)
class Options:
    """One rank. `host`: its address, where it is none of loopback; `namespace`: whose network it uses."""

    group: int
    lighthouse: str
    run_dir: Path
    steps: int
    store_port: int = 0
    rank: int = 0
    ranks: int = 1
    slots: int = 6
    slot_s: float = 0.01
    give_up_s: float = 60
    reduce_s: float = 5
    quorum_s: float = 5
    heal_s: float = 10
    heartbeat_s: float = 0.5
    connect_s: float = 2.0
    stall_s: float = 40
    host: str = ""
    namespace: str = ""

    @property
    def address(self) -> str:
        return self.host or host_of(self.group)


MODULUS = 1 << 20
"""Of states: float32 has all whole numbers up to 2^24, and a long run's sums are larger."""


def gradient(step: int, slot: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order; a state is what they sum to, modulo MODULUS."""
    return torch.tensor([1.0, slot, step, slot * step])


class ToyWork:
    """The protocol's view of a trainer whose slots add known vectors."""

    def __init__(self, options: Options, files: "Files", connection: Connection) -> None:
        self.options, self.files, self.connection = options, files, connection
        self.param = torch.nn.Parameter(torch.zeros(4))
        self.reducer = GradientReducer([self.param], 1 << 20)
        self.step = 0
        self.done: list[int] = []

    def compute(self, step: int, slot: int, *, whole: bool) -> None:
        time.sleep(self.options.slot_s)
        if self.options.ranks > 1:
            dist.all_reduce(torch.zeros(1))  # as FSDP does
        self.files.reach("backward", step)
        self.param.backward(gradient(step, slot))
        self.done.append(slot)

    def refused(self) -> frozenset[int]:
        return frozenset()

    def not_finite(self, step, slots):
        raise AssertionError("no slot is not finite on all groups here")

    def results(self) -> SlotSums:
        tokens = torch.zeros(self.options.slots, dtype=torch.float64)
        tokens[self.done] = 10.0
        if self.options.ranks > 1:
            dist.all_reduce(tokens)
            tokens /= self.options.ranks
        return SlotSums(tokens, tokens * 0.5, torch.zeros(0, dtype=torch.float64), frozenset(self.done))

    def discard(self) -> None:
        self.done.clear()
        self.param.grad = None

    def notes(self, step: int) -> bytes | None:
        return None

    def noted(self, notes: list[bytes]) -> None:
        raise AssertionError("nobody sends notes here")

    def settle(self) -> int:
        return -1

    def serve(self) -> HealState:
        return HealState({"param": self.param.detach()}, {"step": self.step})

    def heal(self, state: HealState) -> None:
        with torch.no_grad():
            self.param.copy_(state.tensors["param"])
        self.step = state.meta["step"]

    def apply(self, commit: Commit) -> None:
        self.reducer.assign(1.0)
        if self.options.ranks > 1:
            dist.all_reduce(torch.zeros(1))  # as clipping does
        with torch.no_grad():
            self.param += self.param.grad
            self.param.remainder_(MODULUS)
        self.step = commit.step
        self.connection.send(
            {
                "step": commit.step,
                "state": self.param.tolist(),
                "owners": commit.owners,
                "tokens": float(commit.tokens.sum()),
                "history": commit.history,
                "parent": commit.parent,
                "groups": commit.groups,
                "time": time.monotonic(),
            }
        )
        self.files.reach("applied", commit.step)

    def checksum(self) -> int | None:
        return int(self.param.detach().abs().sum() * 8) if self.step and self.step % 5 == 0 else None

    def restore(self, quorum) -> tuple[int, int]:
        return 0, ledger.extend(0, 0, "fresh")

    def goes_on(self) -> bool:
        return self.step < self.options.steps

    def save_last(self) -> None:
        pass


class Files(RankFiles):
    """The rank's files, and the faults that are placed at its phases."""

    def __init__(self, options: Options) -> None:
        super().__init__(
            options.run_dir,
            options.group,
            options.rank,
            groups=3,
            steps=options.steps,
            stall_timeout_s=options.stall_s,
        )
        self.order = options.run_dir / f"order-{options.group}-{options.rank}"

    def beat(self, phase: str, step: int) -> None:
        super().beat(phase, step)
        self.reach(phase, step)

    def reach(self, phase: str, step: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            order = json.loads(self.order.read_text())
            if order["phase"] == phase:
                self.order.rename(self.order.with_suffix(".done"))
                os.kill(os.getpid(), signal.SIGKILL if order["do"] == "kill" else signal.SIGSTOP)


def host_of(group: int) -> str:
    return f"127.0.0.{10 + group}"


class Monotonic:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def lighthouse(
    port: int,
    connection: Connection,
    join_timeout_s: float = 30.0,
    heartbeat_timeout_s: float = 0.5,
    groups: int = 0,
    host: str = "127.0.0.1",
    namespace: str = "",
) -> None:
    """A lighthouse behind its gate on a port (0: any), which is sent back; until killed."""
    if namespace:
        enter(namespace)

    rules = GateRules(1, join_timeout_s, heartbeat_timeout_s, groups)
    gate = Gate(TOKEN, (host, port), rules, lambda count, last: None)
    connection.send(int(gate.address.rpartition(":")[2]))
    signal.pause()


def main(options: Options, connection: Connection) -> None:
    """Train, and send each commit over `connection`: dicts, then how it ended."""
    if options.namespace:
        enter(options.namespace)
    host = use_interface(options.address).address
    store = dist.TCPStore(
        host,
        options.store_port,
        is_master=options.rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    if options.ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("group", store), rank=options.rank, world_size=options.ranks
        )
        ranks = GroupRanks(timedelta(seconds=60))
    else:
        ranks = OneRank()
    life = Decisions(ranks).first("life", str(os.getpid()))
    files = Files(options)
    events = EventLog(options.run_dir, options.group, options.rank, "worker")
    work = ToyWork(options, files, connection)
    membership = None
    if options.rank == 0:
        membership = Membership(
            group=options.group,
            life=life,
            token=TOKEN,
            find_lighthouse=lambda: options.lighthouse,
            fenced=files.fenced,
            heartbeat_timeout_s=options.heartbeat_s,
        )
    door = Door(host, TOKEN, timedelta(seconds=options.heal_s))
    column = RankColumn(
        "gloo",
        column=options.rank,
        token=TOKEN,
        host=host,
        connect_timeout=timedelta(seconds=options.connect_s),
        reduce_timeout=timedelta(seconds=options.reduce_s),
    )
    timeouts = Timeouts(
        quorum=timedelta(seconds=options.quorum_s),
        reduce=timedelta(seconds=options.reduce_s),
        compute=timedelta(seconds=20),
        join=timedelta(seconds=30),
        pause=timedelta(seconds=options.heartbeat_s),
        give_up=timedelta(seconds=options.give_up_s),
    )
    around = Host(Monotonic(), files, events)
    protocol = StepProtocol(
        group=Group(options.group, life, f"{host}:{store.port}", ranks, membership, column, door),
        rules=Rules(options.slots, ledger.EVENLY, timeouts),
        work=work,
        reducer=work.reducer,
        host=around,
    )
    driver = Driver(protocol, work, around, timeouts.give_up)
    end = driver.run()
    connection.send(end.name)
    if membership is not None:
        membership.leave()


class OneRank:
    rank, size = 0, 1

    def gather(self, mine):
        return [mine]
