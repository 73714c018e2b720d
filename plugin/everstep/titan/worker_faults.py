"""A worker that breaks itself when it is ordered to (`chaos.orders`), for runs with `fault_tolerance.allow_faults`.

Nothing of the trainer knows this file but the line that starts it: the faults are put around its parts from outside.
"""

import ctypes
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torchtitan.components.checkpointer import CheckpointManager

from everstep import wire
from everstep.attention.injection import Fault as AttentionFault
from everstep.quorum.process_group import PROTOCOL, RankColumn
from everstep.run.files import order_file, read_json
from everstep.snapshot.buffer import BufferWriter
from everstep.step.reduction import local
from everstep.titan import private

POLL_S = 0.05
HOG_BYTES = 2 << 30
STRAGGLE_S = 0.5
CLOCK_JUMP_S = 3600.0
LOSS = 0.1
KILL_AFTER_S = 0.02
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
_BPF_LD_RANDOM, _BPF_JGE, _BPF_RET = 0x20, 0x35, 0x06
_SKF_AD_RANDOM = 0xFFFFF000 + 56


class WorkerFaults:
    """Looks for orders to one rank and carries them out."""

    def __init__(self, trainer: Any, run_dir: Path, group: int, rank: int) -> None:
        self._trainer = trainer
        self._file = order_file(run_dir, group, rank)
        self._seen = ""
        self._pending: dict[str, Any] = {}
        self._until: dict[str, float] = {}
        """Of faults that last: when they end, on the monotonic clock."""
        if trainer.checks is not None and trainer.checks.recorded:
            trainer.checks.injector.always = True
        self._wrap(trainer.files, "beat", self._at_beat)
        self._wrap(trainer, "compute", self._around_compute)
        self._adopts = False
        """Whether it computes the round of a worker that it did not carry."""
        if hasattr(trainer, "inner_step"):
            self._wrap(trainer, "inner_step", self._around_inner_step)
        threading.Thread(target=self._look, name="worker-faults", daemon=True).start()

    def _wrap(self, owner: Any, name: str, around: Callable) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args: around(inner, *args))

    def _look(self) -> None:
        while True:
            order = read_json(self._file)
            if order and order["id"] != self._seen and time.time() < order["deadline"]:
                self._seen = order["id"]
                self._file.unlink(missing_ok=True)  # the worker after this one is not meant
                if order["at"]:
                    self._pending = order
                else:
                    getattr(self, "_" + order["fault"].replace("-", "_"))(order)
            if self._lasts("partition") or self._lasts("lossy-network"):
                _filter_sockets(1.0 if self._lasts("partition") else LOSS)
            time.sleep(POLL_S)

    def _lasts(self, fault: str) -> bool:
        return time.monotonic() < self._until.get(fault, 0.0)

    def _take(self, phase: str) -> str:
        """The fault ordered for this phase, once; "" for none."""
        if self._pending.get("at") != phase:
            return ""
        fault = self._pending["fault"]
        self._pending = {}
        return fault

    def _at_beat(self, beat: Callable, phase: str, step: int = 0) -> None:
        beat(phase, step)
        if phase == "compute":
            return
        manager = self._trainer.checkpointer
        if phase == "checkpoint" and not (isinstance(manager, CheckpointManager) and private.is_due(manager, step)):
            return
        fault = self._take(phase)
        if fault.startswith("kill"):
            # The phase has just begun: it is to be in the middle of it.
            threading.Timer(KILL_AFTER_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif fault == "flipped-weight":
            self._flip_weight()

    def _around_inner_step(self, inner_step: Callable, round_: int, step: int, worker: int) -> tuple[float, float]:
        """Of a worker, in semi-synchronous training."""
        done = inner_step(round_, step, worker)
        steps = self._trainer.round_steps
        if (step - 1) % steps == (steps - 1) // 2 and self._take("half-round"):
            _die()
        if self._adopts and self._pending.get("at") == "adopt" and self._is_first():
            group, fault = self._trainer.config.fault_tolerance.group_id, self._take("adopt")
            self._trainer.events.emit("fault", round_, fault=fault, target_group=group, pids=[os.getpid()])
            _die()
        return done

    def _is_first(self) -> bool:
        """Whether no other group has carried out the order yet that several have."""
        try:
            self._file.with_name(f"{Path(self._seen).name}.taken").touch(exist_ok=False)
        except FileExistsError:
            self._pending = {}
            return False
        return True

    def _around_compute(self, compute: Callable, step: int, slot: int) -> None:
        self._adopts = hasattr(self._trainer, "carries") and not self._trainer.carries(slot)
        if self._lasts("straggler"):
            time.sleep(STRAGGLE_S)
        fault = self._take("compute")
        if fault == "exception":
            raise RuntimeError("an exception, as it was ordered")
        if fault == "flipped-attention":
            assert self._trainer.checks is not None
            # The highest bit of the exponent.
            fault = AttentionFault("bitflip", random.Random(self._seen).random(), 30, 0.0, 1)
            self._trainer.checks.injector.order(fault, self._seen)
        compute(step, slot)
        if fault == "nan-gradient":
            hit = next(p for p in self._trainer.model_parts[0].parameters() if p.requires_grad)
            if hit.grad is None:  # taken already
                hit.grad = torch.zeros_like(hit)
            local(hit.grad).view(-1)[0] = float("nan")

    @torch.no_grad()
    def _flip_weight(self) -> None:
        parameter = next(iter(self._trainer.model_parts[0].parameters()))
        bits = local(parameter).view(-1)[:1].view(torch.int32 if parameter.dtype == torch.float32 else torch.int16)
        bits ^= 1 << (20 if parameter.dtype == torch.float32 else 5)

    # At once

    def _hang_gil(self, order: dict[str, Any]) -> None:
        ctypes.PyDLL(None).sleep(1_000_000)

    def _memory_hog(self, order: dict[str, Any]) -> None:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        taken = []
        while len(taken) << 24 < HOG_BYTES and psutil.virtual_memory().available > HOG_BYTES:
            taken.append(bytearray(os.urandom(1) * (1 << 24)))
        os.kill(os.getpid(), signal.SIGKILL)

    def _straggler(self, order: dict[str, Any]) -> None:
        self._until["straggler"] = time.monotonic() + order["duration_s"]

    def _clock_jump(self, order: dict[str, Any]) -> None:
        true_time = time.time
        time.time = lambda: true_time() + CLOCK_JUMP_S

        def back() -> None:
            time.time = true_time

        threading.Timer(order["duration_s"], back).start()

    def _partition(self, order: dict[str, Any]) -> None:
        self._network("partition", order)

    def _lossy_network(self, order: dict[str, Any]) -> None:
        self._network("lossy-network", order)

    def _network(self, fault: str, order: dict[str, Any]) -> None:
        self._until[fault] = time.monotonic() + order["duration_s"]
        threading.Timer(order["duration_s"] + 2 * POLL_S, _filter_sockets, [0.0]).start()

    def _kill_and_corrupt_heal(self, order: dict[str, Any]) -> None:
        """Flip a bit of what is received, once, below the checksums."""
        receive = wire.Channel.receive_into
        chooser = random.Random(order["id"])

        def corrupted(channel: wire.Channel, view: memoryview) -> None:
            receive(channel, view)
            if len(view) > 4096:
                wire.Channel.receive_into = receive
                view[chooser.randrange(len(view))] ^= 1

        setattr(wire.Channel, "receive_into", corrupted)  # noqa: B010  patching, whatever the type says

    def _kill_heal_source(self, order: dict[str, Any]) -> None:
        """Die in the middle of what a joiner asked for."""
        send = wire.Channel.send_range
        void_at = time.monotonic() + order["deadline"] - time.time()

        def half(channel: wire.Channel, source: wire.Bytes | wire.Lender, offset: int, length: int) -> None:
            in_time = time.monotonic() <= void_at
            send(channel, source, offset, length // 2 if in_time else length)
            if in_time:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(wire.Channel, "send_range", half)  # noqa: B010

    def _kill_during_snapshot(self, order: dict[str, Any]) -> None:
        setattr(BufferWriter, "publish", _die)  # noqa: B010

    def _kill_during_sum(self, order: dict[str, Any]) -> None:
        start = RankColumn.start_on

        def begun(column: RankColumn, which: int, *args: Any) -> Any:
            one = start(column, which, *args)
            return one if which == PROTOCOL else _die()

        setattr(RankColumn, "start_on", begun)  # noqa: B010


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _filter_sockets(loss: float) -> None:
    """Drop this share of what arrives at every TCP socket of the process but its group's own and its agent's.

    A classic BPF program on the socket decides about each packet before the protocol sees it. 0: no filter.
    """
    keep = struct.pack("HBBI", _BPF_RET, 0, 0, 0xFFFFFFFF)
    drop = struct.pack("HBBI", _BPF_RET, 0, 0, 0)
    program = drop
    if loss < 1.0:
        draw = struct.pack("HBBI", _BPF_LD_RANDOM, 0, 0, _SKF_AD_RANDOM)
        program = draw + struct.pack("HBBI", _BPF_JGE, 1, 0, int(loss * 0xFFFFFFFF)) + drop + keep
    buffer = ctypes.create_string_buffer(program)
    attach = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    # Connections within this process and to its agent do not leave the host.
    connections = psutil.Process().net_connections("tcp")
    at_home = {c.laddr.port for c in connections} | {int(os.environ["MASTER_PORT"])}
    for connection in connections:
        if connection.raddr and connection.raddr.port in at_home:
            continue
        try:
            with socket.socket(fileno=os.dup(connection.fd)) as found:
                if loss > 0:
                    found.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attach)
                else:
                    found.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        except OSError:  # closed since, or without a filter
            continue
