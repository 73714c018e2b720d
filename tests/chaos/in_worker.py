"""Carries the orders of more_faults.py out in a worker: the other side of `WorkerFaults.take`.

`--override.imports in_worker.faults` has every worker import this; the override itself changes nothing.
"""

import ctypes
import os
import random
import signal
import socket
import struct
import threading
import time

import psutil
import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import override

from everstep import wire
from everstep.quorum.process_group import PROTOCOL, RankColumn
from everstep.run.files import order_file, read_json
from everstep.snapshot.buffer import BufferWriter
from everstep.step.reduction import local
from everstep.titan.rounds import Rounds
from everstep.titan.worker_faults import WorkerFaults

CLOCK_JUMP_S = 3600.0
KILL_AFTER_S = 0.02
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A classic BPF program of one instruction: return 0, keep nothing of the packet."""


@override(target=OptimizersContainer.Config, description="faults of tests")
def faults(config):
    return config


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class Carrier:
    """The orders of one worker."""

    def __init__(self, trainer, file):
        self.trainer, self.file, self.pending, self.order_id = trainer, file, {}, ""
        self.adopts = False
        """Whether it computes the round of a worker that it did not carry."""
        self._wrap(self.trainer.files, "beat", self.at_beat)
        self._wrap(self.trainer.work, "compute", self.around_compute)
        self.unit = self.trainer.work.unit
        self.makes_rounds = isinstance(self.unit, Rounds)
        if self.makes_rounds:
            self._wrap(self.unit, "inner_step", self.around_inner_step)

    def _wrap(self, owner, name, around):
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args, **named: around(inner, *args, **named))

    def take(self, order):
        self.order_id = order["id"]
        if order["at"]:
            self.pending = order
        else:
            getattr(self, order["fault"].replace("-", "_"))(order)

    def due(self, phase):
        """The fault ordered for this phase, once; "" for none."""
        if self.pending.get("at") != phase:
            return ""
        fault, self.pending = self.pending["fault"], {}
        return fault

    def at_beat(self, beat, phase, step=0):
        beat(phase, step)
        if phase == "compute":
            return
        manager = self.trainer.checkpointer
        if phase == "checkpoint" and not (isinstance(manager, CheckpointManager) and manager._should_save(step)):
            return
        fault = self.due(phase)
        if fault.startswith("kill"):
            # The phase has just begun: it is to be in the middle of it.
            threading.Timer(KILL_AFTER_S, die).start()
        elif fault == "flipped-weight":
            self.flip_weight()

    def around_inner_step(self, inner_step, round_, step, worker, *, whole):
        done = inner_step(round_, step, worker, whole=whole)
        steps = self.trainer.slots.steps_per_commit
        if (step - 1) % steps == (steps - 1) // 2 and self.due("half-round"):
            die()
        if self.adopts and self.pending.get("at") == "adopt" and self.is_first():
            group, fault = self.trainer.config.fault_tolerance.group_id, self.due("adopt")
            self.trainer.events.emit("fault", round_, fault=fault, target_group=group, pids=[os.getpid()])
            die()
        return done

    def is_first(self):
        """Whether no other group has carried out the order yet that several have."""
        try:
            self.file.with_name(f"{self.order_id}.taken").touch(exist_ok=False)
        except FileExistsError:
            self.pending = {}
            return False
        return True

    def around_compute(self, compute, step, slot, *, whole):
        self.adopts = self.makes_rounds and not self.unit.store.holds(slot, self.trainer.work.committed)
        fault = self.due("compute")
        if fault == "exception":
            raise RuntimeError("an exception, as it was ordered")
        compute(step, slot, whole=whole)

    @torch.no_grad()
    def flip_weight(self):
        parameter = next(iter(self.trainer.model_parts[0].parameters()))
        bits = local(parameter).view(-1)[:1].view(torch.int32 if parameter.dtype == torch.float32 else torch.int16)
        bits ^= 1 << (20 if parameter.dtype == torch.float32 else 5)

    # At once

    def hang_gil(self, _):
        ctypes.PyDLL(None).sleep(1_000_000)

    def clock_jump(self, order):
        true_time = time.time
        time.time = lambda: true_time() + CLOCK_JUMP_S
        threading.Timer(order["duration_s"], setattr, [time, "time", true_time]).start()

    def partition(self, order):
        until = time.monotonic() + order["duration_s"]
        while time.monotonic() < until:
            filter_sockets(drop=True)
            time.sleep(0.05)
        filter_sockets(drop=False)

    def kill_and_corrupt_heal(self, order):
        """Flip a bit of what is received, once, below the checksums."""
        receive = wire.Channel.receive_into
        chooser = random.Random(order["id"])

        def corrupted(channel, view):
            receive(channel, view)
            if len(view) > 4096:
                wire.Channel.receive_into = receive
                view[chooser.randrange(len(view))] ^= 1

        wire.Channel.receive_into = corrupted

    def kill_heal_source(self, _):
        """Die in the middle of what a joiner asked for."""
        send = wire.Channel.send_range

        def half(channel, source, offset, length):
            send(channel, source, offset, length // 2)
            die()

        wire.Channel.send_range = half

    def kill_during_snapshot(self, _):
        BufferWriter.publish = die

    def kill_during_sum(self, _):
        start = RankColumn.start_on

        def begun(column, which, *args):
            one = start(column, which, *args)
            return one if which == PROTOCOL else die()

        RankColumn.start_on = begun


def filter_sockets(drop):
    """Drop what arrives at every TCP socket of the process but its group's own and its agent's, or end that."""
    buffer = ctypes.create_string_buffer(DROP)
    attach = struct.pack("HP", 1, ctypes.addressof(buffer))
    # Connections within this process and to its agent do not leave the host.
    connections = psutil.Process().net_connections("tcp")
    at_home = {c.laddr.port for c in connections} | {int(os.environ["MASTER_PORT"])}
    for connection in connections:
        if connection.raddr and connection.raddr.port in at_home:
            continue
        try:
            with socket.socket(fileno=os.dup(connection.fd)) as found:
                if drop:
                    found.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, attach)
                else:
                    found.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        except OSError:  # closed since, or without a filter
            continue


begin, take = WorkerFaults.__init__, WorkerFaults.take


def _begin(worker, trainer, run_dir, group, rank):
    worker.carrier = Carrier(trainer, order_file(run_dir, group, rank))
    order = read_json(order_file(run_dir, group, rank))
    begin(worker, trainer, run_dir, group, rank)
    if order.get("later"):  # it is for the workers after those that were killed
        worker.carrier.take(order)


def _take(worker, order):
    if "at" in order:
        worker.carrier.take(order)
    else:
        take(worker, order)


WorkerFaults.__init__, WorkerFaults.take = _begin, _take
