"""Attention masks, made for one block of query rows at a time. No mask of all queries and keys is ever made."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Visible:
    """The rules of a mask: query i sees key j if every field allows it.

    causal: j <= i. window: i - j <= window. documents: (B, L) ids, which must be equal for i and j. mod: a further
    rule, like flex_attention's mask_mod; it is called with broadcasting indices (batch, head, query, key).
    """

    causal: bool = True
    window: int | None = None
    documents: torch.Tensor | None = None
    mod: MaskMod | None = None

    def keys(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """Return a range of keys outside of which queries start..stop see no key."""
        low = 0 if self.window is None else max(0, start - self.window) // 64 * 64
        return low, min(stop, length) if self.causal else length

    def block(
        self, start: int, stop: int, low: int, high: int, *, batch: int, heads: int, device: torch.device
    ) -> torch.Tensor | None:
        """Return the mask of queries start..stop against keys low..high: true where a query sees a key, broadcastable
        to (B, heads, queries, keys). None: every query sees every key."""
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
    """Return document ids (batch, length) of packed sequences; `cu_seq` are their cumulative lengths."""
    token = torch.arange(batch * length, device=cu_seq.device, dtype=cu_seq.dtype)
    return torch.searchsorted(cu_seq, token, right=True).view(batch, length)
