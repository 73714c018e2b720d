"""Deliberate faults, the same ones for the same seed."""

import random
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from .section import Inject

_WARP_TILE = 16

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in a tensor.

    kind: one of `section.Inject.kind`, or `bits`, which flips all bits of the mask `bit`. place: position of the hit
    element in the flat tensor, 0 to 1. bit: the bit that `bitflip` flips. magnitude: the factor of `scale`, `row` and
    `tile`; an element that is 0 becomes the factor itself. sign: 1 or -1, of `inf` and `near-inf`.
    """

    kind: str
    place: float
    bit: int = 0
    magnitude: float = 1e3
    sign: int = 1

    def index(self, tensor: torch.Tensor) -> int:
        """Return the flat index of the element that is hit."""
        return min(int(self.place * tensor.numel()), tensor.numel() - 1)

    def places(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat indices of all elements that are hit, on the host. `row` hits the last dimension through the
        element, `tile` the aligned 16 x 16 tile around it, every other kind the element alone."""
        flat, columns = self.index(tensor), tensor.shape[-1]
        if self.kind == "row":
            return flat // columns * columns + torch.arange(columns)
        if self.kind != "tile" or tensor.dim() < 2:
            return torch.tensor([flat])
        rows = tensor.shape[-2]
        matrix, inside = divmod(flat, rows * columns)
        first_row, first = (x // _WARP_TILE * _WARP_TILE for x in divmod(inside, columns))
        of_rows = torch.arange(first_row, min(first_row + _WARP_TILE, rows)).unsqueeze(-1)
        of_columns = torch.arange(first, min(first + _WARP_TILE, columns))
        return (matrix * rows * columns + of_rows * columns + of_columns).flatten()

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """Return the new values of the elements x that are hit; same shape and dtype."""
        largest = torch.finfo(x.dtype).max
        if self.kind in ("bitflip", "bits"):
            # torch does not accept a sign bit as a positive Python int.
            mask = self.bit if self.kind == "bits" else 1 << self.bit % (8 * x.element_size())
            mask -= (mask >> (8 * x.element_size() - 1)) << (8 * x.element_size())
            return (x.contiguous().view(_INTEGERS[x.element_size()]) ^ mask).view(x.dtype)
        if self.kind == "nan":
            return torch.full_like(x, float("nan"))
        if self.kind == "inf":
            return torch.full_like(x, self.sign * float("inf"))
        if self.kind == "near-inf":
            return torch.full_like(x, self.sign * 0.9 * largest)
        return torch.where(x == 0, torch.full_like(x, self.magnitude), x * self.magnitude)


def inject(tensor: torch.Tensor, fault: Fault) -> torch.Tensor:
    """Return a copy of `tensor` (..., M, N) with the fault in it."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    flat, places = out.view(-1), fault.places(tensor).to(out.device)
    flat[places] = fault.value(flat[places])
    return out


class Injector:
    """Carries out `[attention_check.inject]` on one rank.

    Args:
        plan: the `[attention_check.inject]` of the config.
        rank: this rank.
    """

    def __init__(self, plan: Inject, rank: int = 0) -> None:
        self.plan, self.rank = plan, rank
        self.places: list[tuple[int, str]] = []
        """Layer and name of each result that can be hit."""
        self._hit_step = 0
        self._armed: tuple[int, str, Fault] | None = None

    def register(self, layer: int, sections: tuple[str, ...]) -> None:
        """Add the results of `layer` that can be hit: those of `sections` that match the plan's pattern."""
        self.places += [(layer, name) for name in sections if fnmatch(name, self.plan.section)]

    @property
    def active(self) -> bool:
        """Whether the plan injects faults at all."""
        return bool(self.plan.kind)

    def begin(self, step: int) -> None:
        """Choose the fault, if one is due, for a slot of `step`. A step is hit once, even if its slots are repeated."""
        plan = self.plan
        due = step >= plan.first_step and (step - plan.first_step) % plan.every == 0
        if not (plan.kind and due and self.places) or step == self._hit_step or plan.rank not in (-1, self.rank):
            self._armed = None
            return
        draw = random.Random(f"{plan.seed} {step} {self.rank}")
        layer, section = draw.choice(self.places)
        bit = draw.randrange(64)
        fault = Fault(plan.kind, draw.random(), bit, sign=draw.choice((-1, 1)))
        self._armed = (layer, section, fault)
        self._step = step

    def renew(self) -> None:
        """Forget the last hit, because what was computed so far is not used."""
        self._armed, self._hit_step = None, 0

    def fault_for(self, layer: int, section: str, part: int = 0, parts: int = 1) -> Fault | None:
        """Return the fault that hits this result, or None. part, parts: the number of the piece and of all pieces, if a
        result is computed in pieces."""
        if self._armed is None or self._armed[:2] != (layer, section):
            return None
        fault = self._armed[2]
        if part != int(fault.place * 7919) % parts:
            return None
        self._armed, self._hit_step = None, self._step
        return fault
