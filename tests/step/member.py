"""One group of a small run: the real protocol, lighthouse, process groups and healing, with a model of four numbers.

Run by test_training_protocol.py, one process a group. The "gradient" of (step, slot) is a known vector, so a test can
say exactly what the state after any step must be, whoever computed what.
"""

import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer

from everstep.quorum.heal import HealServer, HealState
from everstep.quorum.membership import Membership
from everstep.quorum.process_group import CrossGroup
from everstep.run.events import EventLog
from everstep.step.protocol import Blank, Left, SlotRefused, SlotSums, StepProtocol, Timeouts
from everstep.step.reduction import GradientReducer

TOKEN = b"t" * 32


def gradient(step: int, slot: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order."""
    return torch.tensor([1.0, slot, step, slot * step])


class ToyWork:
    """The protocol's view of a trainer whose slots add known vectors."""

    may_refuse = True

    def __init__(self, slots: int, slot_s: float, crash_at: str, refuse: tuple[int, int]) -> None:
        self.param = torch.nn.Parameter(torch.zeros(4))
        self.slots, self.slot_s, self.crash_at = slots, slot_s, crash_at
        self.refuse = refuse
        self.step = 0
        self.done: list[int] = []

    def compute(self, step: int, slot: int) -> None:
        time.sleep(self.slot_s)
        crash_if(self.crash_at, f"compute:{step}:{len(self.done)}")
        self.param.backward(gradient(step, slot))
        if (step, slot) == self.refuse:
            self.refuse = (-1, -1)
            self.param.backward(torch.full((4,), float("nan")))
            raise SlotRefused("the test says so")
        self.done.append(slot)

    def results(self) -> SlotSums:
        tokens = torch.zeros(self.slots, dtype=torch.float64)
        tokens[self.done] = 10.0
        return SlotSums(tokens, tokens * 0.5, torch.zeros(0, dtype=torch.float64))

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
        self.step = state.meta["step"]


def crash_if(wanted: str, here: str) -> None:
    """Die by SIGKILL at a phase, `phase:step` or any step's `phase`."""
    if wanted in (here, here.partition(":")[0]):
        os.kill(os.getpid(), signal.SIGKILL)


def lighthouse(port: int, connection: Connection) -> None:
    """torchft's lighthouse on a port (0: any), which is sent back; until killed."""
    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=30_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=500,
    )
    connection.send(int(server.address().rpartition(":")[2]))
    signal.pause()


@dataclass(frozen=True)
class Options:
    """One member. With `pause_after`, it waits after that commit for a word from the test."""

    group: int
    lighthouse: str
    run_dir: Path
    steps: int
    slots: int = 6
    slot_s: float = 0.01
    on_loss: str = "redistribute"
    crash_at: str = ""
    refuse: tuple[int, int] = (-1, -1)
    flip_at: int = -1
    give_up_s: float = 60
    reduce_s: float = 5
    pause_after: int = -1


def main(args: Options, connection: Connection) -> None:
    """Train, and send each commit over `connection`: first "ready", then dicts, then None."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = ToyWork(args.slots, args.slot_s, args.crash_at, args.refuse)
    events = EventLog(args.run_dir, args.group, 0, "worker")
    membership = Membership(
        group=args.group,
        rank=0,
        world_size=1,
        store=store,
        incarnation=str(os.getpid()),
        store_address=f"127.0.0.1:{store.port}",
        find_lighthouse=lambda: args.lighthouse,
        host="127.0.0.1",
        connect_timeout=timedelta(seconds=10),
    )
    reducer = GradientReducer([work.param], 1 << 20)
    cross = CrossGroup(
        "gloo",
        host="127.0.0.1",
        connect_timeout=timedelta(seconds=2),
        reduce_timeout=timedelta(seconds=args.reduce_s),
    )

    asked_to_leave = False

    def leave(signum: int, frame: object) -> None:
        nonlocal asked_to_leave
        asked_to_leave = True

    signal.signal(signal.SIGTERM, leave)

    def beat(phase: str, step: int) -> None:
        crash_if(args.crash_at, f"{phase}:{step}")

    protocol = StepProtocol(
        group=args.group,
        slots=args.slots,
        on_loss=args.on_loss,
        work=work,
        reducer=reducer,
        membership=membership,
        cross=cross,
        heal_server=HealServer("127.0.0.1", TOKEN, timedelta(seconds=10)),
        token=TOKEN,
        timeouts=Timeouts(
            quorum=timedelta(seconds=5),
            reduce=timedelta(seconds=args.reduce_s),
            heal=timedelta(seconds=10),
            compute=timedelta(seconds=20),
            give_up=timedelta(seconds=args.give_up_s),
        ),
        events=events,
        beat=beat,
        all_in_group=lambda flag: flag,
        asked_to_leave=lambda: asked_to_leave,
        device=torch.device("cpu"),
    )
    connection.send("ready")
    while protocol.step < args.steps:
        try:
            commit = protocol.next()
        except Blank:
            protocol.restored(0)
            continue
        except Left:
            break
        reducer.assign(1.0)
        with torch.no_grad():
            work.param += work.param.grad
        work.step = commit.step
        protocol.committed()
        if args.flip_at == commit.step:
            with torch.no_grad():
                work.param[0] += 1
        if commit.step % 5 == 0:
            protocol.checksum = int(work.param.detach().sum() * 8)
        connection.send(
            {
                "step": commit.step,
                "state": work.param.tolist(),
                "owners": commit.owners,
                "tokens": float(commit.tokens.sum()),
            }
        )
        if protocol.leaving:
            break
        if args.pause_after == commit.step:
            connection.recv()
    connection.send(None)
    membership.leave()
