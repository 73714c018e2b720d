"""`[semi_sync]`: the section of a config that makes training semi-synchronous."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True)
class SemiSync:
    """`[semi_sync]`: workers train on their own for some steps, then their parameters become one again."""

    method: Literal["none", "local_sgd", "diloco"] = "none"
    """`none`: gradients are summed in every step. `local_sgd`: parameters are averaged after every `sync_steps`
    steps of each worker. `diloco`: the mean of what the workers changed is the gradient of an outer optimizer, SGD
    with momentum."""

    workers: int = 0
    """M: into how many parts the global batch is split, each of which trains on its own. The result depends on it, and
    not on how many groups carry the workers. 0: as many as [fault_tolerance] groups."""

    sync_steps: int = 100
    """H: optimizer steps of each worker between two synchronisations."""

    outer_lr: float = 0.7
    """Learning rate of diloco's outer optimizer."""

    outer_momentum: float = 0.9
    """Its momentum, Nesterov's."""

    fragments: int = 1
    """P, diloco only: the model's layers in so many parts, one of which is synchronised every `sync_steps` / P steps,
    in turn (Streaming DiLoCo)."""

    overlap_steps: int = 0
    """τ, diloco only: steps that workers make while a sum is under way."""

    mixing: float = 0.0
    """Diloco only: how much of its own parameters a worker keeps when it takes over what was synchronised, from 0,
    nothing, to less than 1 (the paper's alpha)."""

    @property
    def enabled(self) -> bool:
        return self.method != "none"

    @property
    def round_steps(self) -> int:
        """h: steps of each worker between two synchronisations of anything, H / P."""
        return self.sync_steps // self.fragments

    def commits(self, steps: int) -> int:
        """How many commits a run of so many optimizer steps makes: its rounds, or the steps themselves."""
        return steps // self.round_steps if self.enabled else steps
