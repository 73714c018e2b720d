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
    """Its momentum."""

    nesterov: bool = True
    """Whether its momentum is Nesterov's."""

    @property
    def enabled(self) -> bool:
        return self.method != "none"

    def commits(self, steps: int) -> int:
        """How many commits a run of so many optimizer steps makes: its rounds, or the steps themselves."""
        return steps // self.sync_steps if self.enabled else steps
