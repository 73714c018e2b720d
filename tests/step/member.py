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
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer

from everstep.quorum import voice
from everstep.quorum.door import Door
from everstep.quorum.heal import HealState
from everstep.quorum.membership import Membership
from everstep.quorum.process_group import RankColumn
from everstep.quorum.ranks import GroupRanks
from everstep.run.address import published_address
from everstep.run.events import EventLog
from everstep.run.token import run_token
from everstep.step import ledger
from everstep.step.driver import Driver
from everstep.step.interfaces import Commit, SlotRefused, SlotSums, SumsBroken, Timeouts
from everstep.step.protocol import StepProtocol
from everstep.step.reduction import GradientReducer
from everstep.titan.run_files import RankFiles

TOKEN = b"t" * 32


@dataclass(frozen=True)
class Options:
    """One rank. `refuse`: a step and slot that is refused once; `refuses`: each time; `poison`: one that leaves a
    gradient that is not finite once, and says nothing. With `pause_after`, rank 0 waits after that commit for a word
    from the test. Without `lighthouse` it asks the one whose address is in the run directory."""

    group: int
    lighthouse: str
    run_dir: Path
    steps: int
    store_port: int = 0
    rank: int = 0
    ranks: int = 1
    slots: int = 6
    slot_s: float = 0.01
    on_loss: str = "redistribute"
    crash_at: str = ""
    refuse: tuple[int, int] = (-1, -1)
    refuses: tuple[int, int] = (-1, -1)
    poison: tuple[int, int] = (-1, -1)
    flip_at: int = -1
    audit: int = 5
    give_up_s: float = 60
    reduce_s: float = 5
    quorum_s: float = 5
    heal_s: float = 10
    connect_s: float = 10
    stall_s: float = 40
    heal_delay_s: float = 0.0
    pause_after: int = -1
    pause_at: tuple[str, float] = field(default=("", 0.0))


def gradient(step: int, slot: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order."""
    return torch.tensor([1.0, slot, step, slot * step])


def crash_if(wanted: str, here: str) -> None:
    """Die by SIGKILL at a phase, `phase:step` or any step's `phase`."""
    if wanted in (here, here.partition(":")[0]):
        os.kill(os.getpid(), signal.SIGKILL)


class ToyWork:
    """The protocol's view of a trainer whose slots add known vectors."""

    def __init__(self, options: Options, files: "Files", connection: Connection) -> None:
        self.options, self.files, self.connection = options, files, connection
        self.param = torch.nn.Parameter(torch.zeros(4))
        self.reducer = GradientReducer([self.param], 1 << 20)
        self.refuse, self.poison = options.refuse, options.poison
        self.step = self.history = 0
        self.done: list[int] = []
        self.heard: list[tuple] = []

    def may_refuse(self, step: int, slot: int) -> bool:
        return True

    def compute(self, step: int, slot: int) -> None:
        time.sleep(self.options.slot_s)
        if self.options.ranks > 1:
            dist.all_reduce(torch.zeros(1))  # as FSDP does
        self.files.reach("backward", step)
        crash_if(self.options.crash_at, f"compute:{step}:{len(self.done)}")
        self.param.backward(gradient(step, slot))
        if (step, slot) in (self.refuse, self.options.refuses):
            self.refuse = (-1, -1)
            self.param.backward(torch.full((4,), float("nan")))
            raise SlotRefused("the test says so")
        if (step, slot) == self.poison:
            self.poison = (-1, -1)
            self.param.backward(torch.full((4,), float("nan")))
        self.done.append(slot)

    def testify(self, slots):
        return f"rank {self.options.rank} of group {self.options.group}: {list(slots)}".encode()

    def weigh(self, step, doubts, said):
        self.heard.append(
            (
                step,
                [(doubt.slot, doubt.asked, doubt.alone) for doubt in doubts],
                {group: told.decode() for group, told in said.items()},
            )
        )

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
        return HealState(tensors={"param": self.param.detach()}, meta={"step": self.step}, blobs={})

    def heal(self, state: HealState) -> None:
        with torch.no_grad():
            self.param.copy_(state.tensors["param"])
        self.step, self.history = state.meta["step"], state.meta["history"]

    def apply(self, commit: Commit) -> None:
        self.reducer.assign(1.0)
        if self.options.ranks > 1:
            dist.all_reduce(torch.zeros(1))  # as clipping does
        with torch.no_grad():
            self.param += self.param.grad
            if self.options.flip_at == commit.step:
                self.param[0] += 1
        self.step, self.history = commit.step, commit.history
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
                "heard": self.heard,
            }
        )
        self.files.reach("applied", commit.step)
        if self.options.pause_after == commit.step:
            self.connection.recv()

    def checksum(self) -> int | None:
        return int(self.param.detach().abs().sum() * 8) if self.step and self.step % self.options.audit == 0 else None

    def restore(self) -> tuple[int, int]:
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
        self.options, self.paused, self.step = options, False, 0
        self.order = options.run_dir / f"order-{options.group}-{options.rank}"

    def beat(self, phase: str, step: int) -> None:
        super().beat(phase, step)
        self.reach(phase, step)

    def reach(self, phase: str, step: int) -> None:
        self.step = step
        crash_if(self.options.crash_at, f"{phase}:{step}")
        at, pause_s = self.options.pause_at
        if at == f"{phase}:{step}" and not self.paused:
            self.paused = True
            time.sleep(pause_s)
        with contextlib.suppress(FileNotFoundError):
            order = json.loads(self.order.read_text())
            if order["phase"] == phase and order["step"] in (step, None):
                self.order.rename(self.order.with_suffix(".done"))
                if order["do"] == "sleep":
                    time.sleep(order["seconds"])
                else:
                    os.kill(os.getpid(), signal.SIGKILL if order["do"] == "kill" else signal.SIGSTOP)


class Column(RankColumn):
    """Sums, of which the last message of a tally can get lost: `drop-GROUP` in the run directory says at which step."""

    options: Options
    files: Files

    def total(self, values: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        total = super().total(values, timeout)
        drop = self.options.run_dir / f"drop-{self.options.group}"
        if values.dtype == torch.float64 and drop.exists() and int(drop.read_text()) == self.files.step:
            drop.unlink()
            raise SumsBroken("the last message was lost")
        return total


class SlowDoor(Door):
    """States arrive here later than they could."""

    options: Options

    def fetch(self, address: str, step: int, history: int):
        fetch = super().fetch(address, step, history)
        late = threading.Event()
        threading.Timer(self.options.heal_delay_s, late.set).start()
        state = fetch.state
        fetch.state = lambda: state() if late.is_set() else None
        return fetch


class OldNews(Membership):
    """A lighthouse whose last answer comes once more: `stale-GROUP` in the run directory asks for it."""

    options: Options
    last = None

    def ask(self, request, timeout):
        stale = self.options.run_dir / f"stale-{self.options.group}"
        if stale.exists() and self.last is not None:
            stale.unlink()
            return self.last
        OldNews.last = super().ask(request, timeout)
        return self.last


class Monotonic:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def lighthouse(
    port: int, connection: Connection, join_timeout_s: float = 30.0, heartbeat_timeout_s: float = 0.5
) -> None:
    """torchft's lighthouse on a port (0: any), which is sent back; until killed."""
    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=round(join_timeout_s * 1000),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
    )
    connection.send(int(server.address().rpartition(":")[2]))
    signal.pause()


# The lighthouse of these tests is torchft's own: there is no gate whose name could be waited for.
voice.HELLO_TIMEOUT = timedelta(milliseconds=10)


def main(options: Options, connection: Connection) -> None:
    """Train, and send each commit over `connection`: first "ready", then dicts, then how it ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(
        "127.0.0.1",
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
    life = ranks.broadcast(str(os.getpid()).encode()).decode()
    files = Files(options)
    events = EventLog(options.run_dir, options.group, options.rank, "worker")
    work = ToyWork(options, files, connection)
    membership = None
    token = TOKEN if options.lighthouse else run_token(options.run_dir)
    if options.rank == 0:
        membership = OldNews(
            group=options.group,
            life=life,
            token=token,
            find_lighthouse=lambda: options.lighthouse or published_address(options.run_dir),
            connect_timeout=timedelta(seconds=options.connect_s),
            gated=lambda: not options.lighthouse,
        )
        membership.options = options
    door = SlowDoor("127.0.0.1", token, timedelta(seconds=options.heal_s))
    column = Column(
        "gloo",
        column=options.rank,
        token=token,
        host="127.0.0.1",
        connect_timeout=timedelta(seconds=2),
        reduce_timeout=timedelta(seconds=options.reduce_s),
    )
    door.options = column.options = options
    column.files = files
    protocol = StepProtocol(
        group=options.group,
        life=life,
        slots=options.slots,
        on_loss=options.on_loss,
        work=work,
        reducer=work.reducer,
        ranks=ranks,
        membership=membership,
        sums=column,
        door=door,
        store=f"127.0.0.1:{store.port}",
        timeouts=Timeouts(
            quorum=timedelta(seconds=options.quorum_s),
            reduce=timedelta(seconds=options.reduce_s),
            compute=timedelta(seconds=20),
            join=timedelta(seconds=30),
            give_up=timedelta(seconds=options.give_up_s),
        ),
        clock=Monotonic(),
        files=files,
        events=events,
    )
    driver = Driver(
        group=options.group,
        protocol=protocol,
        work=work,
        clock=Monotonic(),
        files=files,
        events=events,
        give_up=timedelta(seconds=options.give_up_s),
    )
    connection.send("ready")
    end = driver.run()
    connection.send(end.name)
    if membership is not None:
        membership.leave()


class OneRank:
    """The collectives of a group of one."""

    rank, size = 0, 1

    def gather(self, words):
        return [list(words)]

    def broadcast(self, payload):
        return payload
