"""What `step.interfaces.SlotSums.extra` carries: the sums of a tally besides tokens and losses. Each group sends its
own values, and a commit has their sums over all groups. Those of a semi-synchronous round are the experts' biases.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch

from everstep.step.private import local


@dataclass(frozen=True, slots=True)
class StepSums:
    """The extra sums of an optimizer step, which travel as one vector. Each is float64 [n] on the CPU, and its n never
    changes during a run.

    Attributes:
        loads: tokens of each expert, the layers concatenated.
        reached: for each trained parameter, the number of groups that have a gradient for it.
        statuses: by group id its encoded `snapshot.agreement.Status`; empty without snapshots.
    """

    loads: torch.Tensor
    reached: torch.Tensor
    statuses: torch.Tensor

    def pack(self) -> torch.Tensor:
        """Return the fields, concatenated."""
        return torch.cat([self.loads, self.reached, self.statuses])

    def unpack(self, vector: torch.Tensor) -> Self:
        """Split what `pack` returned into fields of the same lengths as this object's. The fields are views."""
        return type(self)(*vector.split([len(self.loads), len(self.reached), len(self.statuses)]))


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
