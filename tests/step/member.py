"""One rank of a group of `harness.Run`: real protocol, driver, process groups and heals, with a model of four numbers.
The "gradient" of (step, slot) is a known vector, so the state after any step is known too, whichever group computed
which slot. Tests inject faults by options and by files in the run directory."""

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import tyro
from torchtitan.config import ParallelismConfig

from everstep.config.sections import FaultTolerance
from everstep.quorum import lighthouse
from everstep.quorum.heal import HealState
from everstep.quorum.interface import use_interface
from everstep.quorum.streams import Streams
from everstep.run.events import EventLog
from everstep.run.stops import die_with_parent
from everstep.run.token import run_token
from everstep.semi.section import SemiSync
from everstep.step import ledger
from everstep.step.interfaces import Commit, SlotSums
from everstep.step.reduction import GradientReducer
from everstep.titan.participation import Participation
from everstep.titan.run_files import RankFiles
from switch import enter


@dataclass(frozen=True)
class Options:
    """Options of a group. `settings`: the keys of its [fault_tolerance] section. `data`: its data's fingerprint."""

    run_dir: str
    settings: dict
    data: str = "known vectors"
    slots: int = 6
    slot_s: float = 0.01


ENDLESS = 1_000_000
MODULUS = 1 << 20
"""States are kept modulo this: float32 has all whole numbers up to 2^24 only, and sums of a long run are larger."""


def gradient(step: int, slot: int) -> torch.Tensor:
    """Return whole numbers, so that sums are exact in any order. A state is the sum of gradients, modulo MODULUS."""
    return torch.tensor([1.0, slot, step, slot * step])


class ToyWork:
    """A trainer (`Work`) whose slots have known gradients."""

    def __init__(self, options: Options, files: "Files", events: EventLog) -> None:
        self.options, self.files, self.events = options, files, events
        self.shares = options.slots
        self.param = torch.nn.Parameter(torch.zeros(4))
        self.reducer = GradientReducer([self.param], 1 << 20)
        self.step = 0
        self.done: list[int] = []

    def compute(self, step: int, slot: int, *, check_all: bool) -> None:
        time.sleep(self.options.slot_s)
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
        dist.all_reduce(tokens)
        tokens /= dist.get_world_size()
        return SlotSums(tokens, tokens * 0.5, torch.zeros(0, dtype=torch.float64), frozenset(self.done))

    def discard(self) -> None:
        self.done.clear()
        self.param.grad = None

    def own_notes(self, step: int) -> bytes | None:
        return None

    def receive_notes(self, notes: list[bytes]) -> None:
        raise AssertionError("nobody sends notes here")

    def await_snapshot(self) -> int:
        return -1

    def serve(self) -> HealState:
        return HealState({"param": self.param.detach()}, {"step": self.step})

    def heal(self, state: HealState) -> None:
        with torch.no_grad():
            self.param.copy_(state.tensors["param"])
        self.step = state.meta["step"]

    def apply(self, commit: Commit) -> None:
        self.reducer.assign(1.0)
        dist.all_reduce(torch.zeros(1))  # as clipping does
        with torch.no_grad():
            self.param += self.param.grad
            self.param.remainder_(MODULUS)
        self.step = commit.step
        told = {name: getattr(commit, name) for name in ("owners", "groups")}
        told |= {name: f"{getattr(commit, name):x}" for name in ("history", "parent")}
        self.events.emit("applied", commit.step, state=self.param.tolist(), tokens=float(commit.tokens.sum()), **told)
        self.files.reach("applied", commit.step)

    def checksum(self) -> int | None:
        return int(self.param.detach().abs().sum() * 8) if self.step and self.step % 5 == 0 else None

    def restore(self, quorum) -> tuple[int, int]:
        return 0, ledger.next_history(0, 0, "fresh")

    def goes_on(self) -> bool:
        return True

    def save_last(self) -> None:
        pass


class Files(RankFiles):
    """The rank's files. Injects the faults that a test has ordered for a phase."""

    def __init__(self, options: Options, ft: FaultTolerance, rank: int) -> None:
        run_dir = Path(options.run_dir)
        super().__init__(run_dir, ft.group_id, rank, steps=ENDLESS, stall_timeout_s=ft.stall_timeout_s)
        self.order = run_dir / f"order-{ft.group_id}-{rank}"

    def beat(self, phase: str, step: int) -> None:
        super().beat(phase, step)
        self.reach(phase, step)

    def reach(self, phase: str, step: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            order = json.loads(self.order.read_text())
            if order["phase"] == phase:
                self.order.rename(self.order.with_suffix(".done"))
                os.kill(os.getpid(), signal.SIGKILL if order["do"] == "kill" else signal.SIGSTOP)


def main() -> None:
    """Run a rank, which emits `applied` for each commit, or the lighthouse; in EVERSTEP_TEST_NAMESPACE if set."""
    die_with_parent(os.getppid())
    if namespace := os.environ.get("EVERSTEP_TEST_NAMESPACE"):
        enter(namespace)
    if sys.argv[1] == "lighthouse":
        sys.exit(tyro.cli(lighthouse.serve, args=sys.argv[2:]))
    options = Options(**json.loads(sys.argv[1]))
    ft, rank = FaultTolerance(**options.settings), int(os.environ["RANK"])
    host = use_interface(ft.bind_host).address
    dist.init_process_group("gloo")
    context = SimpleNamespace(run_dir=Path(options.run_dir), token=run_token(Path(options.run_dir)), host=host)
    context.files, context.events = Files(options, ft, rank), EventLog(context.run_dir, ft.group_id, rank, "worker")
    sections = {"semi_sync": SemiSync(), "parallelism": ParallelismConfig(), "debug": SimpleNamespace(seed=0)}
    config = SimpleNamespace(fault_tolerance=ft, **sections)
    slots = SimpleNamespace(source=SimpleNamespace(fingerprint=lambda: options.data))
    participation = Participation(SimpleNamespace(config=config, context=context, streams=Streams(), slots=slots))
    participation.run(ToyWork(options, context.files, context.events))
    participation.leave()
