"""The state of a semi-synchronous run on one rank: the part that all groups share, and a worker's own part.

All groups have the global parameters, the outer momentum and `marks` of the last rounds. A worker's own state is the
state of its inner optimizer and, with fragments or mixing, its parameters. Only the group that carries the worker has
that state (`everstep.titan.rounds`). Workers' rounds are computed in torchtitan's model and optimizer; between
computations the model has the global parameters, which torchtitan's checkpoints and validation therefore see.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from everstep.quorum.heal import HealState
from everstep.semi.outer import lr_and_momentum
from everstep.semi.rounds import fragments_of
from everstep.semi.section import SemiSync
from everstep.semi.worker_store import StateKey
from everstep.step.private import local
from everstep.titan.state import TrainingState
from everstep.titan.tally import spread

OPTIMIZER = "optimizer/"
PARAM = "param/"
MARKS = "marks"
REMEMBERED = 2
"""Rounds before the last one whose marks are kept, so that a worker's rounds can be made again from an older state. A
worker's state after the round before the last is in a file, or its group waits for that file."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The result of a round's commit: the history after it, and the global parameters of its fragment and the balances
    as bytes. With a mark, the round that follows can be computed again later."""

    history: int
    merged: bytes


class RoundState(TrainingState):
    """The tensors of a semi-synchronous run on this rank.

    Args:
        trainer: an `EverstepTrainer`. Workers' rounds are computed in its model parts and optimizers. Its `step` is the
            number of the optimizer step that the global parameters follow.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._settings: SemiSync = trainer.config.semi_sync
        live = super().handed_over()
        self._live = {name: t.detach() for name, t in live.items() if not name.startswith(OPTIMIZER)}
        self._global = {name: torch.empty_like(t) for name, t in self._live.items()}
        self._balanced = [name for name in self._live if not name.startswith(PARAM)]
        self._trained = [f"{PARAM}{name}" for name, param in self.parameters.items() if param.requires_grad]
        fragment = fragments_of(self._trained, self._settings.fragments)
        self.fragments = [[at for at, f in enumerate(fragment) if f == p] for p in range(self._settings.fragments)]
        """For each fragment, the indices of its parameters in `trained`."""
        has_momentum = lr_and_momentum(self._settings)[1] != 0
        self.outer = {f"outer/{n}": torch.zeros_like(self._global[n]) for n in self._trained if has_momentum}
        """Name -> outer momentum; empty without momentum."""
        self._keeps_params = self._settings.fragments > 1 or self._settings.mixing > 0
        self.marks: dict[int, Mark] = {}
        self.set_global()

    @property
    def in_model(self) -> list[torch.Tensor]:
        """This rank's parts of the trained parameters as the model has them now, in the model's order."""
        return [local(self._live[name]) for name in self._trained]

    @property
    def trained(self) -> list[torch.Tensor]:
        """This rank's parts of the trained parameters as they are globally, in the same order."""
        return [local(self._global[name]) for name in self._trained]

    @property
    def momentum(self) -> list[torch.Tensor]:
        """This rank's parts of the outer momentum, in the same order; empty without momentum."""
        return [local(tensor) for tensor in self.outer.values()]

    @property
    def balances(self) -> list[torch.Tensor]:
        """This rank's parts of the model's persistent buffers as they are now: biases of experts, which no optimizer
        changes. Every round synchronises all of them: each becomes its mean over the workers."""
        return [local(self._live[name]) for name in self._balanced]

    def set_balances(self, flat: torch.Tensor) -> None:
        """Set the global balances to the values of `flat`: float64 [n], all balances concatenated."""
        spread(flat, [self._global[name] for name in self._balanced])

    def fragment_of(self, round_: int) -> list[int]:
        """Return the indices in `trained` of the parameters that a round synchronises."""
        return self.fragments[(round_ - 1) % len(self.fragments)]

    # A worker's own state

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model and optimizer that a worker's own state consists of, by name."""
        own = {name: t for name, t in super().handed_over().items() if name.startswith(OPTIMIZER)}
        return own | ({name: self._live[name] for name in self._trained} if self._keeps_params else {})

    def own_state(self) -> bytes:
        """Return this rank's part of a worker's own state, read from the model and the optimizer as they are now."""
        return packed(self._own().values())

    @torch.no_grad()
    def begin_round_after(self, own: bytes, round_: int) -> None:
        """Set model, optimizer and learning rate to the state in which a worker begins the round after `round_`, one of
        `marks`. `own` is the worker's own state after `round_`.

        The fragment that `round_` synchronised becomes α × the worker's parameters + (1 − α) × the global ones.
        """
        _copy(self._live.values(), self._global.values())
        _unpack(own, self._own().values())
        live = self.in_model
        merged = [live[at] for at in self.fragment_of(round_)]
        mine = [tensor.clone() for tensor in merged]
        _unpack(self.marks[round_].merged, [*merged, *self.balances])
        for tensor, kept in zip(merged, mine, strict=True) if self._settings.mixing else ():
            tensor.lerp_(kept, self._settings.mixing)
        self.set_schedules({"last_epoch": round_ * self._settings.round_steps})

    @torch.no_grad()
    def use_global(self) -> None:
        """Set the model to the global parameters, and the learning rate to the trainer's step."""
        _copy(self._live.values(), self._global.values())
        self.set_schedules({"last_epoch": self._counters.step})

    # What all groups have

    def add_mark(self, round_: int, history: int) -> None:
        """Note that the global parameters are now those after `round_`, with `history`. Drop marks not needed now."""
        trained = self.trained
        synchronised = [trained[at] for at in self.fragment_of(round_)]
        synchronised += [self._global[name] for name in self._balanced]
        self.marks[round_] = Mark(history, packed(synchronised))
        oldest = round_ - REMEMBERED
        self.marks = {known: mark for known, mark in self.marks.items() if oldest <= known <= round_}

    def key(self, worker: int, round_: int) -> StateKey:
        """Return the `StateKey` of a worker's own state after a round of `marks`."""
        return StateKey(worker, round_, self.marks[round_].history)

    @torch.no_grad()
    def set_global(self) -> None:
        """Take the model's parameters and balances as the global ones, as after loading a checkpoint."""
        _copy(self._global.values(), self._live.values())

    def handed_over(self) -> dict[str, torch.Tensor]:
        return {**self._global, **self.outer}

    def serve(self, blobs: dict[str, bytes]) -> HealState:
        """See `TrainingState.serve`. The marks are included, which a joiner needs to take over workers."""
        state = super().serve(blobs | {f"mark/{round_}": mark.merged for round_, mark in self.marks.items()})
        state.meta[MARKS] = [[round_, mark.history] for round_, mark in self.marks.items()]
        return state

    def load(self, state: HealState) -> None:
        super().load(state)
        self.marks = {round_: Mark(history, state.blobs[f"mark/{round_}"]) for round_, history in state.meta[MARKS]}
        self.use_global()

    # For checkpoints

    def on_disk(self, worker: int, own: bytes = b"") -> dict[str, torch.Tensor]:
        """Return a worker's own state by name, as tensors that are sharded like the model's. They are in host memory,
        as a device has no room for more states. If `own` is empty, they are uninitialised, to load into."""
        tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in self._own().items()}
        if own:
            _unpack(own, tensors.values())
        return {f"worker.{worker}.{name}": tensor for name, tensor in tensors.items()}


def _copy(into: Iterable[torch.Tensor], of: Iterable[torch.Tensor]) -> None:
    for target, source in zip(into, of, strict=True):
        target.copy_(source)


def packed(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return the bytes of this rank's parts of the tensors, concatenated."""
    flat = (local(t).detach().cpu().contiguous().flatten().view(torch.uint8) for t in tensors)
    return b"".join(part.numpy().data for part in flat)


@torch.no_grad()
def _unpack(data: bytes | memoryview, tensors: Iterable[torch.Tensor]) -> None:
    """Copy bytes of `packed` into this rank's parts of the tensors. Raises ValueError if the size differs."""
    parts = [local(tensor) for tensor in tensors]
    if len(data) != sum(part.nbytes for part in parts):
        raise ValueError(f"the state has {len(data)} bytes instead of {sum(part.nbytes for part in parts)}")
    begin = 0
    for part in parts:
        if piece := data[begin : begin + part.nbytes]:
            # Copied into a bytearray, because a slice of the bytes may not be aligned.
            part.copy_(torch.frombuffer(bytearray(piece), dtype=part.dtype).view_as(part))
        begin += part.nbytes
