"""Sums of one fragment of the model at a time: a reducer for each, of which a step uses one."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from everstep.semi.quantize import Quantize, decode
from everstep.semi.rounds import fragment_of
from everstep.step.reduction import GradientReducer, all_finite, local


class QuantizedReducer:
    """Implements `everstep.step.interfaces.Reducer` for what workers changed, sent in few bits: every group gets each
    worker's, and adds them in the order of the workers. So the sum is the same to the bit, whoever carries whom.

    Args:
        params: what is summed is of these.
        offered: what this group has for the sum: by worker what `semi.quantize.encode` made of its changes.
        to: of `encode`.
        workers: M.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        offered: Callable[[], Mapping[int, torch.Tensor]],
        to: Quantize,
        workers: int,
    ) -> None:
        self._params, self._offered, self._to, self._workers = params, offered, to, workers
        self._flat = torch.zeros(0)
        self._sums: Any = None
        self._timeout = timedelta(0)

    def begin(self, sums: Any, timeout: timedelta, step: int = 0) -> None:
        self._sums, self._timeout = sums, timeout

    def begin_slot(self, *, last: bool, apart: bool) -> None: ...

    def start(self) -> None: ...

    def end_slot(self) -> None: ...

    def end_slots(self) -> None: ...

    @torch.no_grad()
    def finish(self) -> None:
        mine = self._offered()
        first = local(self._params[0])
        sent = [mine[worker] for worker in sorted(mine)]
        carries = [int(worker in mine) for worker in range(self._workers)]
        rows = self._sums.gather([*carries, len(sent[0]) if sent else 0])
        held, nbytes = [row[:-1] for row in rows], max(row[-1] for row in rows)
        packed = torch.zeros(max(map(sum, held)), nbytes, dtype=torch.uint8, device=first.device)
        for row, change in zip(packed, sent, strict=False):
            row.copy_(change)
        changes: dict[int, torch.Tensor] = {}
        for has, part in zip(held, self._sums.exchange(packed, self._timeout), strict=True):
            changes |= dict(zip((worker for worker, flag in enumerate(has) if flag), part, strict=False))
        size = sum(local(param).numel() for param in self._params)
        self._flat = torch.zeros(size, dtype=torch.float32, device=first.device)
        for worker in sorted(changes):
            self._flat += decode(changes[worker], self._to)

    def finite(self) -> bool:
        return all_finite([self._flat])

    def own_finite(self) -> bool:
        return all_finite(decode(change, self._to) for change in self._offered().values())

    def stash(self) -> torch.Tensor:
        return self._flat.to("cpu", copy=True)

    @torch.no_grad()
    def unstash(self, stashed: torch.Tensor) -> None:
        self._flat = stashed.to(local(self._params[0]).device)

    @torch.no_grad()
    def assign(self, scale: float) -> None:
        pieces = (self._flat * scale).split([local(param).numel() for param in self._params])
        for param, piece in zip(self._params, pieces, strict=True):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            local(param.grad).copy_(piece.view_as(local(param)))


class FragmentReducer:
    """Implements `everstep.step.interfaces.Reducer` for rounds, each of which synchronises one fragment.

    Args:
        reducers: by fragment.
    """

    def __init__(self, reducers: Sequence[GradientReducer | QuantizedReducer]) -> None:
        self._reducers = list(reducers)
        self._now = self._reducers[0]
        self.in_last_slot = False
        """Whether the slot in progress, a worker's round, is the group's last of the attempt."""

    def _of(self, round_: int) -> GradientReducer | QuantizedReducer:
        return self._reducers[fragment_of(round_, len(self._reducers))]

    def begin(self, sums: Any, timeout: timedelta, step: int = 0) -> None:
        self._now = self._of(step)
        self._now.begin(sums, timeout)

    def begin_slot(self, *, last: bool, apart: bool) -> None:
        self.in_last_slot = last
        self._now.begin_slot(last=last, apart=apart)

    def start(self) -> None:
        self._now.start()

    def end_slot(self) -> None:
        self._now.end_slot()

    def end_slots(self) -> None:
        self._now.end_slots()

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
