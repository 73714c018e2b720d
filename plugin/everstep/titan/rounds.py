"""The state of a semi-synchronous run: global parameters, outer momentum, and every worker's inner optimizer.

Every group has all of it after each round. A worker's inner optimizer state cannot be computed from anything else; so
whatever group dies, each of the others can go on with its workers from the round's beginning, and a joiner takes over
the whole as it does in synchronous training. The model's own parameters and optimizer are where a worker's round is
computed; between computations the model has the global parameters and the optimizer the inner state of worker 0, and
that is what torchtitan's checkpoints and validation see.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from everstep.quorum.heal import HealState
from everstep.step.reduction import local
from everstep.titan.state import TrainingState, canonical

OPTIMIZER = "optimizer/"


class RoundState(TrainingState):
    """As `TrainingState`, for M workers.

    Args:
        workers: M.
        momentum: whether the outer optimizer has any.
    """

    def __init__(
        self,
        model_parts: list[torch.nn.Module],
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        counters: Any,
        *,
        workers: int,
        momentum: bool,
    ) -> None:
        super().__init__(model_parts, optimizers, lr_schedulers, counters)
        live = super()._named()
        self._live_params = {name: t for name, t in live.items() if name.startswith("param/")}
        self._buffers = {name: t for name, t in live.items() if name.startswith("buffer/")}
        self._global = {name: torch.empty_like(t) for name, t in self._live_params.items()}
        trained = [f"param/{canonical(name)}" for name, param in self.parameters.items() if param.requires_grad]
        self._trained = trained
        self._momentum = {f"outer/{name}": torch.zeros_like(self._global[name]) for name in trained} if momentum else {}
        self._inner = [{name: torch.empty_like(t) for name, t in self._live_inner.items()} for _ in range(workers)]
        self.begin()

    @property
    def _live_inner(self) -> dict[str, torch.Tensor]:
        """Looked up each time: an optimizer that loads a checkpoint has other tensors afterwards."""
        return {name: t for name, t in super()._named().items() if name.startswith(OPTIMIZER)}

    @property
    def inner_bytes(self) -> int:
        """Size of a worker's inner state on this rank."""
        return sum(local(tensor).nbytes for tensor in self._live_inner.values())

    @property
    def trained(self) -> list[torch.Tensor]:
        """This rank's part of the global parameters that are trained, in the model's order."""
        return [local(self._global[name]) for name in self._trained]

    @property
    def momentum(self) -> list[torch.Tensor]:
        """This rank's part of the outer momentum, in the same order; empty without."""
        return [local(tensor) for tensor in self._momentum.values()]

    @torch.no_grad()
    def begin(self, *, with_workers: bool = False) -> None:
        """The model's parameters are the global ones. If no state was loaded `with_workers`, each of them has the
        optimizer's, and there is no momentum."""
        _copy(self._global.values(), self._live_params.values())
        if not with_workers:
            for tensor in self.momentum:
                tensor.zero_()
            for inner in self._inner:
                _copy(inner.values(), self._live_inner.values())

    @torch.no_grad()
    def enter(self, worker: int) -> None:
        """Make model, optimizer and learning rate what a worker begins the round with."""
        _copy(self._live_params.values(), self._global.values())
        _copy(self._live_inner.values(), self._inner[worker].values())
        self._lr_schedulers.load_state_dict({"last_epoch": self._counters.step})
        for scheduler in self._lr_schedulers:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def rest(self) -> None:
        """Make model, optimizer and learning rate what they are between computations."""
        self.enter(0)

    def live_inner(self) -> bytes:
        """The inner state that the optimizer has now, on this rank."""
        flat = [local(t).detach().cpu().contiguous().flatten().view(torch.uint8) for t in self._live_inner.values()]
        return torch.cat(flat).numpy().tobytes()

    @torch.no_grad()
    def set_inner(self, worker: int, state: memoryview) -> None:
        """Make a worker's inner state what `live_inner` gave, on whatever group."""
        begin = 0
        for tensor in self._inner[worker].values():
            part = local(tensor)
            # A copy: slices of the bytes need not be aligned.
            flat = torch.frombuffer(bytearray(state[begin : begin + part.nbytes]), dtype=part.dtype)
            part.copy_(flat.view_as(part))
            begin += part.nbytes
        if begin != len(state):
            raise ValueError(f"an inner state of {len(state)} bytes, and not {begin}")

    def _named(self) -> dict[str, torch.Tensor]:
        named = {**self._global, **self._buffers, **self._momentum}
        for worker, inner in enumerate(self._inner):
            named |= {f"worker/{worker}/{name}": tensor for name, tensor in inner.items()}
        return named

    def load(self, state: HealState) -> None:
        super().load(state)
        self.rest()

    # What a checkpoint has besides torchtitan's own

    def state_dict(self) -> dict[str, Any]:
        inner = {f"worker.{m}.{name}": t for m, inner in enumerate(self._inner) for name, t in inner.items()}
        return {**self._momentum, **inner}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mine = self.state_dict()
        _copy(mine.values(), (state_dict[name] for name in mine))


def _copy(into: Iterable[torch.Tensor], of: Iterable[torch.Tensor]) -> None:
    for target, source in zip(into, of, strict=True):
        target.copy_(source)
