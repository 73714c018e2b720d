"""The config section `[semi_sync]`, which makes training semi-synchronous."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True)
class SemiSync:
    """`[semi_sync]`: workers train independently for some steps, then their parameters are combined."""

    method: Literal["none", "local_sgd", "diloco"] = "none"
    """`none`: gradients are summed in every step. `local_sgd`: parameters are averaged after every `sync_steps`
    steps of each worker. `diloco`: the mean of the workers' parameter changes is the gradient of an outer optimizer,
    SGD with momentum."""

    workers: int = 0
    """M: number of workers. Each trains alone on its part of the global batch. The result depends on this number, not
    on the number of groups that carry the workers. 0: as many as [fault_tolerance] groups."""

    sync_steps: int = 100
    """H: optimizer steps of each worker between two synchronisations of the same parameter."""

    outer_lr: float = 0.7
    """Learning rate of diloco's outer optimizer."""

    outer_momentum: float = 0.9
    """Nesterov momentum of diloco's outer optimizer."""

    fragments: int = 1
    """P, diloco only: number of parts that the model is split into, by layers. Every `sync_steps` / P steps one part
    is synchronised, in turn (Streaming DiLoCo). `sync_steps` must be a multiple of P."""

    overlap_steps: int = 0
    """τ, diloco only: steps that workers make while the sum over groups is running."""

    mixing: float = 0.0
    """Diloco only: weight of a worker's own parameters, from 0 to less than 1, when it takes over a synchronised part
    (the paper's alpha). The global parameters have the rest of the weight."""

    @property
    def enabled(self) -> bool:
        return self.method != "none"

    @property
    def round_steps(self) -> int:
        """h = H / P: optimizer steps of each worker in a round, after which one fragment is synchronised."""
        return self.sync_steps // self.fragments

    @property
    def needs(self) -> str:
        """What the workers' states in a checkpoint depend on: it must be equal where they are loaded."""
        said = [f'method = "{self.method}"', f"fragments = {self.fragments}"]
        said += [f"sync_steps = {self.sync_steps}"] if self.fragments > 1 else []
        said += [f"{key} {'> 0' if getattr(self, key) else '= 0'}" for key in ("mixing", "outer_momentum")]
        return ", ".join(said)

    def commits(self, steps: int) -> int:
        """Return the number of commits in so many optimizer steps. A commit is a round, or without workers a step."""
        return steps // self.round_steps if self.enabled else steps
