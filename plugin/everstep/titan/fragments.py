"""Sums of one fragment of the model at a time: a reducer for each, of which a step uses one."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from everstep.semi.rounds import fragment_of
from everstep.step.reduction import AsyncSums, GradientReducer
from everstep.step.streams import Streams


class FragmentReducer:
    """Implements `everstep.step.interfaces.Reducer` for rounds, each of which synchronises one fragment.

    Args:
        fragments: by fragment its parameters.
        bucket_bytes, streams: of `GradientReducer`.
    """

    def __init__(self, fragments: Sequence[Sequence[torch.nn.Parameter]], bucket_bytes: int, streams: Streams) -> None:
        self._reducers = [GradientReducer(params, bucket_bytes, streams, hooks=False) for params in fragments]
        self._now = self._reducers[0]

    def _of(self, round_: int) -> GradientReducer:
        return self._reducers[fragment_of(round_, len(self._reducers))]

    def begin(self, sums: AsyncSums, timeout: timedelta, step: int = 0) -> None:
        self._now = self._of(step)
        self._now.begin(sums, timeout)

    def begin_slot(self, *, last: bool) -> None:
        self._now.begin_slot(last=last)

    def start(self) -> None:
        self._now.start()

    def end_slot(self) -> None:
        self._now.end_slot()

    def keep(self) -> None:
        self._now.keep()

    def take_back(self) -> None:
        self._now.take_back()

    def finish(self) -> None:
        self._now.finish()

    def finite(self) -> bool:
        return self._now.finite()

    def own_finite(self) -> bool:
        return self._now.own_finite()

    def stash(self) -> Any:
        return self._reducers.index(self._now), self._now.stash()

    def unstash(self, stashed: Any) -> None:
        which, sums = stashed
        self._now = self._reducers[which]
        self._now.unstash(sums)

    def assign(self, scale: float) -> None:
        self._now.assign(scale)
