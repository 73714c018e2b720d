"""Everstep's work on the device "late", each piece as it is right and with a bug planted in the streams that it gets.
`python cases.py` prints {case: [races of the right one, races with the bug]} as JSON."""

import contextlib
import gc
import json
from datetime import timedelta

import numpy as np
import torch

import late
from everstep.quorum.heal import HealState, _Copy
from everstep.quorum.in_flight import SumQueue
from everstep.quorum.streams import DeviceStreams
from everstep.run.exits import end_at_once
from everstep.snapshot.layout import CopyPlan, State
from everstep.step.reduction import GradientReducer
from late.collectives import work_of

DEVICE = torch.device("late", 0)
MINUTE = timedelta(minutes=1)


class Careless(DeviceStreams):
    """Everstep's streams without some of what they do."""

    def __init__(self, *forgets: str) -> None:
        super().__init__(DEVICE)
        for name in forgets:
            setattr(self, name, lambda *args: None)
        self._waits = "synchronize" not in forgets

    def record(self):
        told = self._waits or self.current() != self._sums.stream_id
        return super().record() if told else None


def streams(planted: bool, *forgets: str) -> DeviceStreams:
    return Careless(*forgets) if planted else DeviceStreams(DEVICE)


def unwaited(planted: bool):
    """With a bug the device does nothing meanwhile: no thread happens to have waited for it."""
    return late.held() if planted else contextlib.nullcontext()


def ones(size: int = 1 << 10) -> torch.Tensor:
    return torch.ones(size, device=DEVICE)


class Doubling:
    """A communicator between this process and one like it."""

    on_device = True

    def allreduce(self, tensor: torch.Tensor, timeout: timedelta):
        tensor.add_(tensor)
        return work_of([])

    def error(self) -> str:
        return ""

    def abort(self) -> None:
        pass


class Sums:
    """Sums as those of a `RankColumn`."""

    def __init__(self, streams: DeviceStreams, waits: bool = True) -> None:
        self.queue, self._waits = SumQueue(Doubling(), streams), waits

    def start(self, tensor, timeout):
        return self.queue.start(tensor, timeout)

    def finish(self, one):
        if self._waits:
            one.queue.finish(one)


def backward(reducer: GradientReducer, params: list[torch.nn.Parameter], *, last: bool, on=None) -> None:
    reducer.begin_slot(last=last)
    with on or contextlib.nullcontext():
        if on is not None:
            on.wait_stream(torch.late.default_stream())
        torch.stack([(param * 2).sum() for param in params]).sum().backward()
    reducer.end_slot()


def summed(streams: DeviceStreams, sums: Sums, *, on=None) -> None:
    """Two attempts of two slots each, the gradients computed on stream `on`."""
    params = [torch.nn.Parameter(ones()) for _ in range(4)]
    reducer = GradientReducer(params, 1 << 13, streams)
    for _ in range(2):
        reducer.begin(sums, MINUTE)
        backward(reducer, params, last=False, on=on)
        backward(reducer, params, last=True, on=on)
        reducer.finish()
        if on is not None:
            torch.accelerator.current_stream().wait_stream(on)
        reducer.assign(0.5)
        for param in params:
            param.grad = None


def sum_begun_early(planted: bool) -> None:
    """A sum begins when its bucket is filled."""
    summed(DeviceStreams(DEVICE), Sums(streams(planted, "wait")))


def assigned_early(planted: bool) -> None:
    """The sums become gradients once they are complete."""
    with unwaited(planted):
        summed(DeviceStreams(DEVICE), Sums(DeviceStreams(DEVICE), waits=not planted))


def bucket_freed(planted: bool) -> None:
    """A sum is given up, and its bucket gets other memory."""
    own = DeviceStreams(DEVICE)
    queue = SumQueue(Doubling(), own)
    bucket = ones()
    own.record().synchronize()
    with unwaited(planted):
        one = queue.start(bucket, MINUTE)
        if not planted:
            one.queue.finish(one)
        del bucket
        ones()


def optimizer_over_copy(planted: bool) -> None:
    """A snapshot is copied from the device; then the optimizer changes the parameters."""
    params = {f"model/{n}": ones() for n in range(3)}
    plan = CopyPlan(State(params), (0,), 0, 0, 1)
    whole, own = np.empty(plan.layout.size, dtype=np.uint8), streams(planted, "synchronize")
    with unwaited(planted):
        plan.copy(whole, b"", own, own.record(), lambda: None)
        for param in params.values():
            param.add_(1)


def copied_before_commit(planted: bool) -> None:
    """A snapshot is copied behind the optimizer's step."""
    params = {"model/0": ones()}
    plan = CopyPlan(State(params), (0,), 0, 0, 1)
    whole, own = np.empty(plan.layout.size, dtype=np.uint8), streams(planted, "wait")
    params["model/0"].add_(1)
    plan.copy(whole, b"", own, own.record(), lambda: None)


def healed_from_early(planted: bool) -> None:
    """A joiner's copy of a state is made behind the optimizer's step."""
    tensor = ones()
    tensor.add_(1)
    copy = _Copy(HealState(tensors={"p": tensor}), streams(planted, "wait"), 60)
    copy.begin()
    [piece] = copy.views(0, 4)
    assert planted or bytes(piece) == torch.tensor([2.0]).numpy().tobytes()


CASES = [sum_begun_early, assigned_early, bucket_freed, optimizer_over_copy, copied_before_commit, healed_from_early]


def races(case, planted: bool) -> list[str]:
    torch.accelerator.synchronize()
    torch.ops.late.forget()
    case(planted)
    gc.collect()
    found = torch.ops.late.reports()  # accesses that nothing orders, each with both stacks
    torch.accelerator.synchronize()
    return found


def main() -> None:
    torch.distributed.init_process_group("lateccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    print(json.dumps({case.__name__: [races(case, False), races(case, True)] for case in CASES}))


if __name__ == "__main__":
    main()
    end_at_once(0)  # a thread of sums that is inside of the backend then aborts the interpreter's clean-up, rarely
