"""What travels in a tally beside tokens and losses (`step.interfaces.SlotSums.extra`): fields with names.

All values are sums: a group gives its own, and a commit brings those of all groups together.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

import torch

from everstep.step.private import local


@dataclass(frozen=True, slots=True)
class Sums:
    """Fields that travel as one vector, each float64 [n] on the CPU with an n that never changes."""

    def pack(self) -> torch.Tensor:
        """The fields end to end."""
        return torch.cat([getattr(self, field.name) for field in fields(self)])

    def unpack(self, vector: torch.Tensor) -> Self:
        """The inverse of `pack`, for fields as long as these; views."""
        return type(self)(*vector.split([len(getattr(self, field.name)) for field in fields(self)]))


@dataclass(frozen=True, slots=True)
class StepSums(Sums):
    """Of an optimizer step.

    Attributes:
        loads: tokens that each expert got, all layers end to end.
        reached: for each trained parameter how many groups have a gradient of it.
        words: by group what it says of its snapshots (`snapshot.agreement.Word`); empty without snapshots.
    """

    loads: torch.Tensor
    reached: torch.Tensor
    words: torch.Tensor


@dataclass(frozen=True, slots=True)
class RoundSums(Sums):
    """Of a semi-synchronous round.

    Attributes:
        tokens, loss: valid tokens and the sum of their losses, by optimizer step of the round.
        balances: what the workers would have experts' biases be, all layers end to end.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    balances: torch.Tensor


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The values of this rank's part of tensors end to end, float64 on the CPU."""
    parts = (local(tensor).detach().flatten().double().cpu() for tensor in tensors)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


@torch.no_grad()
def spread(vector: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """The inverse of `flat`, in place."""
    parts = [local(tensor) for tensor in tensors]
    for part, piece in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
        part.copy_(piece.view_as(part))
