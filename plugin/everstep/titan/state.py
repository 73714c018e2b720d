"""The training state that a joiner takes over from a live group: all that a step depends on, and nothing derived.

Threads serve the state while a forward may be running, so it is a set of references to the sharded parameters, taken
once, before training. A module's `state_dict()` would not do: FSDP2's hooks reshard parameters in use, and hooks that
split a fused parameter return copies, which later steps do not change.

Random numbers need no state: every slot and every optimizer step is seeded by itself (`slot_seed`).
"""

import hashlib
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan import trainer as titan

from everstep.quorum.heal import HealState
from everstep.snapshot.layout import Shard
from everstep.step.private import local
from everstep.titan import private
from everstep.titan.names import init_optim_state

ROW = 4096
"""Number of 64-bit words that are summed before the sums are hashed."""


def slot_seed(seed: int, step: int, slot: int, dp_rank: int) -> int:
    """Return a 63-bit seed for the random numbers of one slot on one data-parallel rank, the same on every group.

    A negative `slot` stands for an optimizer step: -1, or in a semi-synchronous run -1 - m for worker m.
    """
    text = f"{seed}/{step}/{slot}/{dp_rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def canonical(name: str) -> str:
    """Return a parameter's or buffer's name in the whole model, without the names of the wrappers that activation
    checkpointing and torch.compile put around modules."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


class TrainingState:
    """The state that one rank of a group hands over to the same rank of another: tensors, learning rates and counters.
    Tensors have their names in the whole model, so that groups with another parallelism find them.

    Args:
        trainer: torchtitan's trainer, its model parts parallelized and initialized. Missing optimizer state is created
            here, so that a joiner has tensors to heal into.
    """

    def __init__(self, trainer: titan.Trainer) -> None:
        self._optimizers, self._lr_schedulers = list(trainer.optimizers), trainer.lr_schedulers
        self._counters = trainer
        """The trainer, whose `state_dict()` has the counters."""
        self.parameters: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        for part in trainer.model_parts:
            self.parameters |= {canonical(name): param for name, param in part.named_parameters()}
            # Names in state_dict() are without activation checkpointing's wrappers, those of named_buffers() with them.
            persistent = set(map(canonical, part.state_dict()))
            named = {canonical(name): buffer for name, buffer in part.named_buffers()}
            buffers |= {name: buffer for name, buffer in named.items() if name in persistent}
        self._names = {param: name for name, param in self.parameters.items()}
        self._in_model = {f"param/{name}": param for name, param in self.parameters.items()}
        self._in_model |= {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        for optimizer in self._optimizers:
            if not optimizer.state:
                init_optim_state(optimizer)
                # That made a step with zero gradients, which Adam's bias correction must not count.
                for state in optimizer.state.values():
                    if "step" in state:
                        state["step"].zero_()

    def handed_over(self) -> dict[str, torch.Tensor]:
        """Return by name the tensors that a joiner takes over: this rank's parameters, persistent buffers and optimizer
        state. Optimizer state is looked up at every call, as loading a checkpoint replaces its tensors."""
        named = dict(self._in_model)
        for optimizer in self._optimizers:
            for param, state in optimizer.state.items():
                name = self._names[param]
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        named[f"optimizer/{name}/{key}"] = value
        return named

    @torch.no_grad()
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return name -> this rank's local tensor, in the same memory as the trainer's."""
        tensors = self.handed_over()
        for name, tensor in tensors.items():
            part = local(tensor)
            tensors[name] = part.detach() if part.requires_grad else part
        return tensors

    def shards(self) -> dict[str, Shard]:
        """Return, for each tensor that is sharded, which part of the whole tensor this rank has."""
        found = {}
        for name, tensor in self.handed_over().items():
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                _, offset = private.local_box(tensor.shape, mesh, placements)
                found[name] = Shard(tuple(tensor.shape), tuple(offset))
        return found

    def serve(self, blobs: dict[str, bytes]) -> HealState:
        """Return the state in the form that a heal source serves, with `blobs` added; tensors are by reference."""
        meta = {"lr_schedulers": self._lr_schedulers.state_dict(), "counters": self._counters.state_dict()}
        return HealState(tensors=self.tensors(), meta=meta, blobs=blobs)

    @torch.no_grad()
    def load(self, state: HealState) -> None:
        """Copy in a state that `serve` returned on the same rank of another group.

        Raises:
            ValueError: the tensors' names differ from this rank's: another model or optimizer.
        """
        mine = self.tensors()
        if mine.keys() != state.tensors.keys():
            differing = sorted(mine.keys() ^ state.tensors.keys())
            raise ValueError(f"the state is of another model or optimizer: only one of the two has {differing[:3]}")
        for name, tensor in mine.items():
            tensor.copy_(state.tensors[name])
        self.set_schedules(state.meta["lr_schedulers"])
        self._counters.load_state_dict(state.meta["counters"])

    def set_schedules(self, state: dict[str, Any]) -> None:
        """Set the learning rate schedules, and the rates used next, which torchtitan's schedules do not restore."""
        self._lr_schedulers.load_state_dict(state)
        for scheduler in self._lr_schedulers:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    @torch.no_grad()
    def checksum(self) -> int:
        """Return a 63-bit checksum of the bits of this rank's parameters: equal parameters have equal checksums. One
        host synchronisation."""
        params = self.parameters.values()
        return digest(chain.from_iterable(rows_of(local(param).detach()) for param in params))


def rows_of(part: torch.Tensor) -> list[torch.Tensor]:
    """Return the input of `digest` for a tensor that is not a DTensor: the sums of `ROW` 64-bit words each, modulo
    2^64. A flipped bit changes one of the sums. They are computed at the speed of memory, and stay on the device."""
    start = part.storage_offset() * part.itemsize
    if part.nbytes % 8 or part.data_ptr() % 8 or start % 8 or not part.is_contiguous():
        flat = part.contiguous().view(-1).view(torch.uint8)
        part = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)) if flat.numel() % 8 else flat.clone()
    words = part.view(-1).view(torch.int64)
    whole = words.numel() // ROW * ROW
    rows = [words[:whole].view(-1, ROW).sum(1)] if whole else []
    return [*rows, words[whole:].sum(0, keepdim=True)] if whole < words.numel() else rows


def digest(rows: Iterable[torch.Tensor]) -> int:
    """Return a 63-bit checksum of what `rows_of` returned; it depends on the order. One host synchronisation."""
    found = list(rows)
    whole = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
    return int.from_bytes(hashlib.blake2b(whole.cpu().numpy().tobytes(), digest_size=8).digest(), "little") >> 1
