"""Who sees whom, one block of query rows at a time, so that no mask of the whole square is ever made."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Visible:
    """Query i sees key j when every field allows it.

    causal: j <= i. window: i - j <= window. documents: (B, L) ids that must be equal. mod: any further rule,
    as flex_attention's mask_mod, called with broadcasting indices (batch, head, query, key).
    """

    causal: bool = True
    window: int | None = None
    documents: torch.Tensor | None = None
    mod: MaskMod | None = None

    def keys(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """The range of keys that queries start..stop can see at all."""
        low = 0 if self.window is None else max(0, start - self.window) // 64 * 64
        return low, min(stop, length) if self.causal else length

    def block(
        self, start: int, stop: int, low: int, high: int, *, batch: int, heads: int, device: torch.device
    ) -> torch.Tensor | None:
        """Mask of queries start..stop against keys low..high: True where seen, broadcastable to (B, heads,
        queries, keys); None where all is seen."""
        i = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
        j = torch.arange(low, high, device=device).view(1, 1, 1, -1)
        seen: torch.Tensor | None = None
        if self.causal and high - 1 > start:
            seen = j <= i
        if self.window is not None and stop - 1 - low > self.window:
            near = i - j <= self.window
            seen = near if seen is None else seen & near
        if self.documents is not None:
            same = self.documents[:, None, start:stop, None] == self.documents[:, None, None, low:high]
            seen = same if seen is None else seen & same
        if self.mod is not None:
            b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
            h = torch.arange(heads, device=device).view(1, -1, 1, 1)
            allowed = self.mod(b, h, i, j)
            seen = allowed if seen is None else seen & allowed
        return seen


def documents_of(cu_seq: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Document ids (batch, length) of packed sequences with cumulative lengths `cu_seq` over batch·length
    tokens."""
    token = torch.arange(batch * length, device=cu_seq.device, dtype=cu_seq.dtype)
    return torch.searchsorted(cu_seq, token, right=True).view(batch, length)
