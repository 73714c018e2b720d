"""What travels in a tally beside tokens and losses (`step.interfaces.SlotSums.extra`): fields with names.

All values are sums: a group gives its own, and a commit brings those of all groups together.
"""

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class StepSums:
    """Of an optimizer step, float64 each.

    Attributes:
        loads: tokens that each expert got, all layers end to end.
        reached: for each trained parameter how many groups have a gradient of it.
        words: by group what it says of its snapshots (`snapshot.agreement.Word`); empty without snapshots.
    """

    loads: torch.Tensor
    reached: torch.Tensor
    words: torch.Tensor


@dataclass(frozen=True, slots=True)
class RoundSums:
    """Of a semi-synchronous round, float64 each.

    Attributes:
        tokens, loss: valid tokens and the sum of their losses, by optimizer step of the round.
        balances: what the workers would have experts' biases be, all layers end to end.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    balances: torch.Tensor


T = TypeVar("T", StepSums, RoundSums)


class Layout(Generic[T]):
    """Such fields as one vector, float64 on the CPU.

    Args:
        kind: of the fields.
        sizes: elements of each, in the order of `kind`.
    """

    def __init__(self, kind: type[T], *sizes: int) -> None:
        self._kind, self._sizes = kind, sizes

    def pack(self, sums: T) -> torch.Tensor:
        """The fields end to end. Raises ValueError for other sizes."""
        parts = [getattr(sums, field.name).double().cpu() for field in fields(self._kind)]
        if tuple(len(part) for part in parts) != self._sizes:
            raise ValueError(f"{self._kind.__name__} of {[len(part) for part in parts]} and not {list(self._sizes)}")
        return torch.cat(parts)

    def unpack(self, vector: torch.Tensor) -> T:
        """The inverse of `pack`; views."""
        return self._kind(*vector.split(list(self._sizes)))
