"""Named fields for `step.interfaces.SlotSums.extra`, the sums that a tally carries besides tokens and losses.

Each group sends its own values, and a commit has their sums over all groups.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

import torch

from everstep.step.private import local


@dataclass(frozen=True, slots=True)
class Sums:
    """Tensors that travel as one vector. Each is float64 [n] on the CPU, and its n never changes during a run."""

    def pack(self) -> torch.Tensor:
        """Return the fields, concatenated."""
        return torch.cat([getattr(self, field.name) for field in fields(self)])

    def unpack(self, vector: torch.Tensor) -> Self:
        """Split what `pack` returned into fields of the same lengths as this object's. The fields are views."""
        return type(self)(*vector.split([len(getattr(self, field.name)) for field in fields(self)]))


@dataclass(frozen=True, slots=True)
class StepSums(Sums):
    """The extra sums of an optimizer step.

    Attributes:
        loads: tokens of each expert, the layers concatenated.
        reached: for each trained parameter, the number of groups that have a gradient for it.
        statuses: by group id its encoded `snapshot.agreement.Status`; empty without snapshots.
    """

    loads: torch.Tensor
    reached: torch.Tensor
    statuses: torch.Tensor


@dataclass(frozen=True, slots=True)
class RoundSums(Sums):
    """The extra sums of a semi-synchronous round.

    Attributes:
        tokens, loss: valid tokens and the sum of their losses, by optimizer step of the round.
        balances: the experts' biases after the workers' rounds, the layers concatenated.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    balances: torch.Tensor


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return this rank's parts of tensors, flattened and concatenated: float64 on the CPU."""
    parts = (local(tensor).detach().flatten().double().cpu() for tensor in tensors)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


@torch.no_grad()
def spread(vector: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Write a vector from `flat` back into this rank's parts of tensors."""
    parts = [local(tensor) for tensor in tensors]
    for part, piece in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
        part.copy_(piece.view_as(part))
