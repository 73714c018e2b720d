"""How far a correct result may be from its checksum.

Let y = a @ b be a product of inner length K, accumulated in a dtype of unit roundoff u. The error of its element (i, j)
is bounded by `growth` times Σ_k |a_ik| |b_kj|. The classical growth is K·u. But the rounding errors of the steps do not
all have one sign, and λ√K·u with λ = 8 is exceeded with probability below 3e-14·K (Higham and Mary, SIAM J. Sci.
Comput. 41(5), 2019). `growth` is the smaller of the two, plus 64 u for the checksum, a sum of 64 elements.

Partial sums can reach Σ|a||b|, but usually do not. If the signs of their terms vary, they reach the root of the sum of
squares of the terms. If the signs do not vary, they reach the result, and if terms repeat, the errors of a whole tile
have one sign. `product.row_deviation` applies the growth to that root plus the tile's Σ|y_ij|. A bound from Σ|a||b|
would be √K times as wide, and at K = 32k hide an error as large as the result.

A result that is stored in a narrower dtype is off by a further u_store·|y_ij|. These errors need not average out: a
constant row is rounded the same way everywhere. The bound for sums of such a result is therefore u_store·Σ|y_ij|, which
no input can exceed. It grows with the number of elements, and with it the smallest error that can be seen. Checksums
are therefore kept over tiles of 64 elements, not over whole rows.
"""

import math
from typing import Any

import torch

TILE = 64
"""Most elements under one checksum, unless `tile_width` finds no divisor."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to `dtype` (round to nearest)."""
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of `dtype` are summed and checksums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def growth(inner: int, dtype: torch.dtype) -> float:
    """Return the bound on error / Σ|a||b| of a product of inner length `inner`, summed in `accumulator(dtype)`."""
    return unit_roundoff(accumulator(dtype)) * (64 + min(inner, 8 * math.sqrt(inner)))


def operand_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error, beyond the accumulator's, with which the device multiplies: that of both operands if
    PyTorch is set to read fp32 as TF32 or bf16, that of partial sums of fp16 on CPUs, as some sum in fp16; else 0."""
    if dtype == torch.float32:
        # PyTorch raises if `allow_tf32` is read after `fp32_precision` was set.
        matmul = _settings(device) or getattr(torch.backends.mkldnn, "matmul", None)
        return {"tf32": 2.0**-10, "bf16": 2.0**-7}.get(str(getattr(matmul, "fp32_precision", "")), 0.0)
    if device.type == "cpu" and dtype == torch.float16:
        return 2.0**-7
    return 0.0


def store_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error of storing an accumulated product in `dtype`. For a narrow dtype it is the unit
    roundoff, or twice that if a GPU may reduce split products in the narrow dtype."""
    if dtype == accumulator(dtype):
        return 0.0
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    twice = bool(getattr(_settings(device), f"allow_{name}_reduced_precision_reduction", False))
    return unit_roundoff(dtype) * (2 if twice else 1)


def _settings(device: torch.device) -> Any:
    """Return PyTorch's settings for products on this type of device, or None if it has none."""
    return getattr(getattr(torch.backends, device.type, None), "matmul", None)


def tile_width(length: int) -> int:
    """Return the number of elements under one checksum: the largest divisor of `length` from 32 to TILE; if there is
    none, `length` itself."""
    for width in range(min(length, TILE), min(32, length) - 1, -1):
        if length % width == 0:
            return width
    return length


def tiles(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return x with `dim` split into (tiles, width)."""
    width = tile_width(x.shape[dim])
    return x.unflatten(dim, (x.shape[dim] // width, width))


def tile_totals(x: torch.Tensor) -> torch.Tensor:
    """Return sums over tiles of the last dimension: (..., N) to (..., T), in the accumulator dtype."""
    acc = accumulator(x.dtype)
    if x.dim() > 1 and x.mT.is_contiguous() and not x.is_contiguous():
        return tiles(x.mT, -2).sum(-2, dtype=acc).mT
    return tiles(x).sum(-1, dtype=acc)


def tile_energies(x: torch.Tensor) -> torch.Tensor:
    """Return sums of squares over tiles of the last dimension: (..., N) to (..., T), in the accumulator dtype."""
    if x.device.type == "cpu" and x.is_contiguous():  # this way the squares are not written to memory
        return torch.linalg.vector_norm(tiles(x), dim=-1, dtype=accumulator(x.dtype)).square()
    return tile_totals(x.to(accumulator(x.dtype)).square())


def tile_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return sums of magnitudes over tiles of the last dimension: (..., N) to (..., T), in the accumulator dtype."""
    if x.device.type == "cpu":
        # On a CPU torch's 1-norm takes ten times as long.
        return tile_totals(x.abs())
    return torch.linalg.vector_norm(tiles(x), ord=1, dim=-1, dtype=accumulator(x.dtype))


def underflow(terms: int, dtype: torch.dtype) -> float:
    """Return how much too small a root of a sum of `terms` squares can be, as squares below the least normal vanish."""
    return math.sqrt(terms * torch.finfo(accumulator(dtype)).tiny)


def vanishing(dtype: torch.dtype) -> float:
    """Return the size below which a device may take numbers for 0. All devices keep the denormals of fp16, but not
    those of other dtypes."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)


def norms(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return Euclidean norms along `dim`, -1 or -2, in the accumulator dtype. Underflow cannot lower them."""
    acc = accumulator(x.dtype)
    return torch.linalg.vector_norm(x, dim=dim, dtype=acc) + underflow(x.shape[dim], x.dtype)
