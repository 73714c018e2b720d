"""A module for `[job] module` whose trainers fail on demand: torchtitan's debug Llama 3 with two layers, on a small
text.

Before each slot a trainer looks into the folder EVERSTEP_CAUSES for files with the name of an order (see ORDERS). It
obeys and removes `group-G`. `group-G.always` stays, also for the group's later processes. `slot-S` and `slot-S.step-T`
are for every group that computes that slot. `host-G` says what is wrong with a group's host from the beginning.
"""

import contextlib
import ctypes
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from everstep.step.private import local
from everstep.titan.data import texts
from everstep.titan.data.byte_tokenizer import ByteTokenizer
from everstep.titan.slot_computer import SlotComputer

FOLDER = Path(os.environ.get("EVERSTEP_CAUSES", "."))
GROUP_ID = "--fault_tolerance.group_id"
SLOW_S, TOO_MUCH = 0.25, 1 << 47
_compute, _time = SlotComputer.compute, time.time
_after: list[Callable[[SlotComputer], None]] = []
"""Changes to make to the gradients of the current slot, after it is computed."""
_held: list[object] = []
_slow_s = 0.0

texts.stdlib_sources = lambda root: sorted((root / "json").glob("*.py"))
DATASETS["notes"] = DatasetConfig(
    path="given as dataset_path",
    loader=lambda path: load_dataset("json", data_files=path, split="train", streaming=True),
    sample_processor=lambda row: row["text"],
)


def debugmodel() -> Trainer.Config:
    config = llama3_debugmodel()
    assert config.model_spec is not None
    model = config.model_spec.model
    model.layers = model.layers[:2]  # pyrefly: ignore[missing-attribute]
    return config


def jsonl() -> Trainer.Config:
    config = debugmodel()
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="notes", infinite=False)
    return config


def _raises(error: BaseException) -> None:
    raise error


def _slow(slots: SlotComputer) -> None:
    global _slow_s
    _slow_s = SLOW_S


@torch.no_grad()
def _scale(slots: SlotComputer, factor: float) -> None:
    for param in slots.trainable:
        local(param).mul_(factor)


def _flip(slots: SlotComputer) -> None:
    local(slots.trainable[-1]).detach().view(torch.int32).view(-1)[7] ^= 1 << 10


def _flip_products(slots: SlotComputer) -> None:
    def flipped(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        wrong = output.detach().clone()
        wrong.view(torch.int32).view(-1)[7] ^= 1 << 10
        return output + (wrong - output).detach()

    model = slots._trainer.model_parts[0]
    next(iter(model.layers.values())).feed_forward.register_forward_hook(flipped)


def _multiply_wrongly(slots: SlotComputer) -> None:
    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = torch.bmm(a[None], b[None])[0]
        if b.shape == (256, 256):
            y[0, 0] += 8 * y.std()
        return y

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", wrong, "CPU")
    _held.append(library)


def _no_gradient(slots: SlotComputer) -> None:
    grad = slots.trainable[0].grad
    assert grad is not None
    local(grad).view(-1)[0] = math.nan


def _refuse_connections(slots: SlotComputer) -> None:
    """Refuse the other groups' connections, as a firewall would: shut down the socket that listens for them."""
    port = int(slots._trainer.participation.column.address.rpartition(":")[2])
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as door:  # not all are sockets
            if door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and door.getsockname()[1] == port:
                door.shutdown(socket.SHUT_RDWR)


ORDERS: dict[str, Callable[[SlotComputer], object]] = {
    "runtime": lambda slots: _raises(RuntimeError("the tokenizer of this host is broken")),
    "key": lambda slots: _raises(KeyError("c4")),
    "memory": lambda slots: _raises(MemoryError()),
    "device-memory": lambda slots: _raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "allocate": lambda slots: _held.append(torch.zeros(TOO_MUCH, dtype=torch.uint8)),
    "descriptors": lambda slots: _held.extend([os.open("/dev/null", os.O_RDONLY) for _ in range(1 << 20)]),
    "exit": lambda slots: sys.exit(3),
    "exit-unseen": lambda slots: os._exit(7),
    "segv": lambda slots: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": lambda slots: os.abort(),
    "bus": lambda slots: os.kill(os.getpid(), signal.SIGBUS),
    "hang": lambda slots: time.sleep(1e6),
    "hang-interpreter": lambda slots: ctypes.PyDLL(None).sleep(10**6),
    "slow": _slow,
    "eat": lambda slots: _held.extend(torch.ones(1 << 20) for _ in range(1 << 12)),
    "nan": lambda slots: _scale(slots, math.nan),
    "inf": lambda slots: _scale(slots, math.inf),
    "huge": lambda slots: _scale(slots, 1e30),
    "no-gradient": lambda slots: _after.append(_no_gradient),
    "flip": _flip,
    "flip-products": _flip_products,
    "multiply-wrongly": _multiply_wrongly,
    "refuse-connections": _refuse_connections,
}


def _computed(slots: SlotComputer, step: int, slot: int, *, check_all: bool) -> None:
    name = f"group-{sys.argv[sys.argv.index(GROUP_ID) + 1]}"
    _after.clear()
    for path in map(FOLDER.joinpath, (name, f"{name}.always", f"slot-{slot}", f"slot-{slot}.step-{step}")):
        try:
            order = path.read_text()
        except FileNotFoundError:
            continue
        if path.name == name:
            path.unlink()
        ORDERS[order](slots)
    time.sleep(_slow_s)
    _compute(slots, step, slot, check_all=check_all)
    for spoil in _after:
        spoil(slots)


_host = FOLDER / f"host-{sys.argv[sys.argv.index(GROUP_ID) + 1]}" if GROUP_ID in sys.argv else FOLDER / "host"
if _host.exists():  # the host is wrong before its trainer begins
    match _host.read_text():
        case "ahead":
            time.time = lambda: _time() + 3600.0
        case "behind":
            time.time = lambda: _time() - 3600.0
        case "away":
            time.sleep(1e6)
SlotComputer.compute = _computed  # pyrefly: ignore[bad-assignment]
