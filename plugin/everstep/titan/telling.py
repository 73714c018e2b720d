"""What a trainer tells of its commits."""

from typing import Any

import torch.distributed as dist
from torchtitan import trainer as titan
from torchtitan.components.metrics import BaseLogger

from everstep.step.interfaces import Commit
from everstep.titan import private

VALIDATION_LOSS = "validation_metrics/loss"
"""torchtitan's name of it."""


class Measures(BaseLogger):
    """What torchtitan measures of this rank, by torchtitan's names. Its line goes to the rank's log, its metrics come
    here: the trainer takes them into its events, of which the curves are drawn.

    Args:
        trainer: torchtitan's, whose `MetricsProcessor` logs here from now on.
    """

    def __init__(self, trainer: titan.Trainer) -> None:
        self._processor = trainer.metrics_processor
        self._processor.logger = self
        self._logged: dict[str, float] = {}
        schedule = trainer.config.parallelism.pipeline_parallel_schedule
        self._knows_loss = dist.get_rank() == private.metrics_rank(trainer.parallel_dims, schedule)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._logged = metrics

    def of(self, step: int, commit: Commit, grad_norm: float, extra: dict[str, Any]) -> dict[str, float]:
        """The metrics of a commit, at the optimizer steps at which torchtitan would log them; empty at others."""
        if not self._processor.should_log(step):
            return {}
        counted = commit.tokens > 0
        mean_loss = float(commit.loss.sum() / commit.tokens.sum())
        worst = float((commit.loss[counted] / commit.tokens[counted]).max())
        self._processor.data_loading_times.append(0.0)
        self._processor.log(step, mean_loss, worst, grad_norm, extra_metrics=extra)
        return {name: float(value) for name, value in self._logged.items()}

    def validation_loss(self) -> float | None:
        """Of the last validation; None on a rank that does not know it."""
        return self._logged[VALIDATION_LOSS] if self._knows_loss else None
