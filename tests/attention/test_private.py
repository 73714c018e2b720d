"""The private names of torch that the room relies on are there and mean what they are used for."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from everstep.attention import private


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_a_forward_inside_a_backward_knows_it():
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(private.recomputing())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(private.recomputing())
            return grad * 2

    Looks.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [False, True]


def test_what_is_computed_can_be_kept_from_what_follows_it():
    with Counting() as mode:
        torch.ones(2) + 1
        counted = mode.calls
        with private.unseen_by_checkpointing():
            torch.ones(2) + 1
        assert mode.calls == counted > 0
