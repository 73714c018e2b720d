"""What workers changed of one fragment of the model at a time, and its sum: a round uses one of several reducers."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from everstep.semi.quantize import Quantize, decode, encode
from everstep.semi.rounds import fragment_of
from everstep.step.reduction import BUCKET_BYTES, LARGEST, LARGEST_PART, GradientReducer, all_within, local
from everstep.step.streams import Streams


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
        offered: Mapping[int, torch.Tensor],
        to: Quantize,
        workers: int,
    ) -> None:
        self._params, self._offered, self._to, self._workers = params, offered, to, workers
        self._flat = torch.zeros(0)
        self._sums: Any = None
        self._timeout = timedelta(0)

    def begin(self, sums: Any, timeout: timedelta, step: int = 0) -> None:
        self._sums, self._timeout = sums, timeout

    def begin_slot(self, *, last: bool) -> None: ...

    def start(self) -> None: ...

    def end_slot(self) -> None: ...

    def forget(self) -> None: ...

    @torch.no_grad()
    def finish(self) -> None:
        mine = self._offered
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
        return all_within(LARGEST, [self._flat])

    def own_finite(self) -> bool:
        return all_within(LARGEST_PART, (decode(change, self._to) for change in self._offered.values()))

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


class Changes:
    """Implements `everstep.step.interfaces.Reducer` for rounds: what the workers that this group holds have changed of
    the round's fragment, and its sum over the groups.

    Args:
        params: that are trained, in the model's order.
        fragments: by fragment the places of its parameters among them.
        workers: M.
        to: of `encode`.
        streams: of `GradientReducer`.
        exact: whether the sum has the same bits in every order.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        fragments: list[list[int]],
        workers: int,
        to: Quantize,
        streams: Streams,
        *,
        exact: bool,
    ) -> None:
        self._params, self._fragments, self._to = params, fragments, to
        self._changed = [torch.zeros_like(param) for param in params]
        """Summed over the workers; with exact sums of one worker, until its slot ends."""
        self._sent: dict[int, torch.Tensor] = {}
        """The same by worker, where it is sent in fewer bits."""
        parts = ([params[at] for at in places] for places in fragments)
        self._reducers = [
            GradientReducer(part, BUCKET_BYTES, streams, hooks=False, exact_slots=workers if exact else 0)
            if to == "none"
            else QuantizedReducer(part, self._sent, to, workers)
            for part in parts
        ]
        self._now = self._reducers[0]

    # What was changed

    @torch.no_grad()
    def add(self, round_: int, worker: int, changes: Iterable[torch.Tensor]) -> None:
        """A worker's changes of the round's fragment, this rank's parts, join what is summed."""
        if self._to != "none":
            self._sent[worker] = encode(torch.cat([change.flatten() for change in changes]), self._to)
            return
        for at, change in zip(self._fragments[fragment_of(round_, len(self._fragments))], changes, strict=True):
            local(self._changed[at]).add_(change)

    def begin_sum(self, round_: int) -> None:
        """The sum begins if this is the group's last worker, and goes on while the worker makes its last steps."""
        if self._to == "none":
            self.offer(round_)
            self.start()

    def offer(self, round_: int) -> None:
        """What is summed stands where the reducer looks for gradients, and nothing else does."""
        for param in self._params:
            param.grad = None
        for at in self._fragments[fragment_of(round_, len(self._fragments))]:
            self._params[at].grad = self._changed[at]

    def forget(self) -> None:
        """Nothing has been changed yet."""
        for reducer in self._reducers:
            reducer.forget()
        self._sent.clear()
        for changed in self._changed:
            local(changed).zero_()

    # Its sum

    def begin(self, sums: Any, timeout: timedelta, step: int = 0) -> None:
        self._now = self._reducers[fragment_of(step, len(self._reducers))]
        self._now.begin(sums, timeout)

    def begin_slot(self, *, last: bool) -> None:
        self._now.begin_slot(last=last)

    def start(self) -> None:
        self._now.start()

    def end_slot(self) -> None:
        self._now.end_slot()

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
