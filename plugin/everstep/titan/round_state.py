"""The state of a semi-synchronous run: what all groups have, and one worker's own while it computes.

All groups have the global parameters and the outer momentum, and of the last rounds the history and what the
parameters were that each synchronised (`marks`). A worker's own state is its inner optimizer's, and its parameters
where they are not just the global ones; only the group that carries the worker has it (`everstep.titan.rounds`). The
model's own parameters and optimizer are where a worker's round is computed; between computations the model has the
global parameters, and that is what torchtitan's checkpoints and validation see.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from everstep.quorum.heal import HealState
from everstep.semi.outer import lr_and_momentum
from everstep.semi.rounds import fragments_of
from everstep.semi.section import SemiSync
from everstep.semi.worker_store import Place
from everstep.step.private import local
from everstep.titan.state import TrainingState
from everstep.titan.tally import spread

OPTIMIZER = "optimizer/"
PARAM = "param/"
MARKS = "marks"
REMEMBERED = 2
"""Rounds before the last one that a worker may have to make again: its state after the round before the last is on
storage, or is waited for."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a round's commit left behind: the history, and the parameters of its fragment and the balances as bytes.
    With these a worker can be brought from the round's end to the next one's, at any later time."""

    history: int
    merged: bytes


class RoundState(TrainingState):
    """The tensors of a semi-synchronous run on this rank.

    Args:
        trainer: an `EverstepTrainer`; a worker's round is computed in its model parts and optimizers, and its `step` is
            the optimizer step after which the global parameters are.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._settings: SemiSync = trainer.config.semi_sync
        live = self.live()
        self._live_params = {name: t.detach() for name, t in live.items() if name.startswith(PARAM)}
        self._live_balances = {name: t for name, t in live.items() if name.startswith("buffer/")}
        self._global = {name: torch.empty_like(t) for name, t in self._live_params.items()}
        self._balances = {name: torch.empty_like(t) for name, t in self._live_balances.items()}
        self._trained = [f"{PARAM}{name}" for name, param in self.parameters.items() if param.requires_grad]
        fragment = fragments_of(self._trained, self._settings.fragments)
        self.fragments = [[at for at, f in enumerate(fragment) if f == p] for p in range(self._settings.fragments)]
        """By fragment the places of its parameters among those that are trained."""
        has_momentum = lr_and_momentum(self._settings)[1] != 0
        self.outer = {f"outer/{n}": torch.zeros_like(self._global[n]) for n in self._trained if has_momentum}
        """The outer momentum by name."""
        self._keeps_params = self._settings.fragments > 1 or self._settings.mixing > 0
        self.marks: dict[int, Mark] = {}
        self.begin()

    @property
    def in_model(self) -> list[torch.Tensor]:
        """This rank's part of the parameters that the model has now and that are trained, in the model's order."""
        return [local(self._live_params[name]) for name in self._trained]

    @property
    def trained(self) -> list[torch.Tensor]:
        """The same of the global parameters."""
        return [local(self._global[name]) for name in self._trained]

    @property
    def momentum(self) -> list[torch.Tensor]:
        """The same of the outer momentum; empty without."""
        return [local(tensor) for tensor in self.outer.values()]

    @property
    def balances(self) -> list[torch.Tensor]:
        """This rank's part of the persistent buffers that the model has now: experts' biases, which no optimizer knows.
        All of them are synchronised in every round: they become their mean over the workers."""
        return [local(tensor) for tensor in self._live_balances.values()]

    def balance(self, flat: torch.Tensor) -> None:
        """Make the global balances these values, float64 [n], end to end."""
        spread(flat, self._balances.values())

    def fragment(self, round_: int) -> list[int]:
        """The places of the parameters that a round synchronises."""
        return self.fragments[(round_ - 1) % len(self.fragments)]

    # A worker's own state

    def _own(self) -> dict[str, torch.Tensor]:
        """What is a worker's own, by name: of the optimizer, and of the parameters."""
        own = {name: t for name, t in self.live().items() if name.startswith(OPTIMIZER)}
        return own | ({name: self._live_params[name] for name in self._trained} if self._keeps_params else {})

    @property
    def own_bytes(self) -> int:
        """Size of a worker's own state on this rank."""
        return sum(local(tensor).nbytes for tensor in self._own().values())

    def leave(self) -> bytes:
        """The own state of the worker that the model and the optimizer have now, on this rank."""
        return packed(self._own().values())

    @torch.no_grad()
    def enter(self, own: bytes, round_: int) -> None:
        """Make model, optimizer and learning rate what a worker begins the round after `round_` with, whose own state
        after it is given: the fragment that was synchronised becomes α times its own, and 1 − α times the global one's.

        `round_` is in `marks`.
        """
        _copy(self._live_params.values(), self._global.values())
        _unpack(own, self._own().values())
        live = self.in_model
        merged = [live[at] for at in self.fragment(round_)]
        mine = [tensor.clone() for tensor in merged]
        _unpack(self.marks[round_].merged, [*merged, *self.balances])
        for tensor, kept in zip(merged, mine, strict=True) if self._settings.mixing else ():
            tensor.lerp_(kept, self._settings.mixing)
        self.set_schedules({"last_epoch": round_ * self._settings.round_steps})

    @torch.no_grad()
    def rest(self) -> None:
        """Make model and learning rate what they are between computations."""
        _copy(self._live_params.values(), self._global.values())
        _copy(self._live_balances.values(), self._balances.values())
        self.set_schedules({"last_epoch": self._counters.step})

    # What all groups have

    def mark(self, round_: int, history: int) -> None:
        """The global parameters are those after a round of `history`; what is needed of earlier rounds is kept."""
        trained = self.trained
        synchronised = [trained[at] for at in self.fragment(round_)]
        self.marks[round_] = Mark(history, packed([*synchronised, *self._balances.values()]))
        oldest = round_ - REMEMBERED
        self.marks = {known: mark for known, mark in self.marks.items() if oldest <= known <= round_}

    def place(self, worker: int, round_: int) -> Place:
        """Of a worker's state after a round that is in `marks`."""
        return Place(worker, round_, self.marks[round_].history)

    @torch.no_grad()
    def begin(self) -> None:
        """The model's parameters and balances become the global ones, as after loading."""
        _copy(self._global.values(), self._live_params.values())
        _copy(self._balances.values(), self._live_balances.values())

    def handed_over(self) -> dict[str, torch.Tensor]:
        return {**self._global, **self._balances, **self.outer}

    def serve(self, blobs: dict[str, bytes]) -> HealState:
        """See `TrainingState.serve`. Also what a joiner needs to take workers over."""
        state = super().serve(blobs | {f"mark/{round_}": mark.merged for round_, mark in self.marks.items()})
        state.meta[MARKS] = [[round_, mark.history] for round_, mark in self.marks.items()]
        return state

    def load(self, state: HealState) -> None:
        super().load(state)
        self.marks = {round_: Mark(history, state.blobs[f"mark/{round_}"]) for round_, history in state.meta[MARKS]}
        self.rest()

    # What a checkpoint has besides torchtitan's own

    def on_disk(self, worker: int, own: bytes = b"") -> dict[str, torch.Tensor]:
        """A worker's own state by name, as tensors that are sharded like the model's; in the host's memory, as a device
        has room for its own. `own`: empty to load into."""
        tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in self._own().items()}
        if own:
            _unpack(own, tensors.values())
        return {f"worker.{worker}.{name}": tensor for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_outer(self, saved: dict[str, Any]) -> None:
        _copy(self.outer.values(), (saved[name] for name in self.outer))


def _copy(into: Iterable[torch.Tensor], of: Iterable[torch.Tensor]) -> None:
    for target, source in zip(into, of, strict=True):
        target.copy_(source)


def packed(tensors: Iterable[torch.Tensor]) -> bytes:
    """This rank's part of tensors as bytes, end to end."""
    flat = (local(t).detach().cpu().contiguous().flatten().view(torch.uint8) for t in tensors)
    return b"".join(part.numpy().data for part in flat)


@torch.no_grad()
def _unpack(data: bytes | memoryview, tensors: Iterable[torch.Tensor]) -> None:
    """The inverse of `packed`, in place. Raises ValueError for bytes of another size."""
    parts = [local(tensor) for tensor in tensors]
    if len(data) != sum(part.nbytes for part in parts):
        raise ValueError(f"a state of {len(data)} bytes, and not {sum(part.nbytes for part in parts)}")
    begin = 0
    for part in parts:
        if piece := data[begin : begin + part.nbytes]:
            # A copy: slices of the bytes need not be aligned.
            part.copy_(torch.frombuffer(bytearray(piece), dtype=part.dtype).view_as(part))
        begin += part.nbytes
