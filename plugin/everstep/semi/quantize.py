"""What a worker changed, in fewer bits.

Each worker's change is rounded by itself, to nearest, before any sum: so the sum does not depend on which group carries
which worker. It is taken over float32 in the order of the workers. What rounding takes away is not kept for the next
round (no error feedback).
"""

from typing import Literal

import torch

Quantize = Literal["none", "bf16", "int8"]
BLOCK = 256
"""Values that share a scale in int8: the block's largest magnitude is 127 steps."""


def encode(values: torch.Tensor, to: Quantize) -> torch.Tensor:
    """float32 [n] as bytes, uint8. What is not finite is not finite after `decode` either."""
    if to == "none":
        return values.float().view(torch.uint8)
    if to == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = torch.nn.functional.pad(values.float(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) / 127
    steps = (blocks / torch.where(scales > 0, scales, 1).unsqueeze(1)).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), steps.flatten()[: len(values)].view(torch.uint8)])


def decode(data: torch.Tensor, to: Quantize) -> torch.Tensor:
    """The inverse of `encode` but for rounding: float32 [n]."""
    if to == "none":
        return data.view(torch.float32)
    if to == "bf16":
        return data.view(torch.bfloat16).float()
    blocks = -(-len(data) // (BLOCK + 4))
    scales, steps = data[: 4 * blocks].clone().view(torch.float32), data[4 * blocks :].view(torch.int8)
    return steps.float() * scales.repeat_interleave(BLOCK)[: len(steps)]
