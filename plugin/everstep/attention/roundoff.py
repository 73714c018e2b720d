"""How far a correct result may be from its checksum.

A product y = a @ b of inner length K, accumulated in a dtype of unit roundoff u, is off by at most
`growth(K) · Σ_k |a_ik| |b_kj|` in element (i, j). The classical bound has K·u for the growth; rounding errors
of different steps are not all of one sign, and λ√K·u with λ = 8 is exceeded with probability below 1e-13
(Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019). The smaller of both is used, with a floor of 64 u for the
sums themselves. Σ|a||b| is what partial sums can add up to; what they do add up to is the root of the sum of squares of
their terms, where signs vary, and the result, where they do not, with errors that are of one sign in a whole tile where
terms repeat. `product.row_deviation` takes the growth of those two: a bound on Σ|a||b| alone would be √K times as wide,
and at K = 32k hide an error as large as the result.

A result that is stored in a narrower dtype is off by a further u_store·|y_ij|, and nothing averages out for
certain: a constant row is rounded the same way everywhere. Sums of such a result are therefore bounded by
u_store·Σ|y_ij|, which no input can exceed. Checksums are kept over tiles of 64 elements, not whole rows,
because that sum, and with it the smallest error that can be seen, grows with the number of elements.
"""

import math
from typing import Any

import torch

TILE = 64
"""Widest run of elements under one checksum."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype` (round to nearest)."""
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` are summed, and in which checksums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def growth(inner: int, dtype: torch.dtype) -> float:
    """Relative error of a product of inner length `inner`, accumulated in `accumulator(dtype)`, against
    Σ|a||b|."""
    return unit_roundoff(accumulator(dtype)) * (64 + min(inner, 8 * math.sqrt(inner)))


def operand_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error, beyond the accumulator's, with which the device multiplies: fp32 read as TF32 or bf16 where
    PyTorch was told to, and fp16 summed in fp16 on CPUs that can."""
    if dtype == torch.float32:
        # Not `allow_tf32`: PyTorch raises where that is read after `fp32_precision` was set.
        matmul = _settings(device) or getattr(torch.backends.mkldnn, "matmul", None)
        return {"tf32": 2.0**-10, "bf16": 2.0**-7}.get(str(getattr(matmul, "fp32_precision", "")), 0.0)
    if device.type == "cpu" and dtype == torch.float16:
        return 2.0**-7
    return 0.0


def store_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of storing an accumulated product in `dtype`.

    Twice the unit roundoff where a GPU may reduce split products in the narrow dtype.
    """
    if dtype == accumulator(dtype):
        return 0.0
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    twice = bool(getattr(_settings(device), f"allow_{name}_reduced_precision_reduction", False))
    return unit_roundoff(dtype) * (2 if twice else 1)


def _settings(device: torch.device) -> Any:
    """How a device of this type was told to multiply, where it has settings of its own."""
    return getattr(getattr(torch.backends, device.type, None), "matmul", None)


def tile_width(length: int) -> int:
    """Elements under one checksum: the largest divisor of `length` up to TILE, or all where only a small one
    divides."""
    for width in range(min(length, TILE), min(32, length) - 1, -1):
        if length % width == 0:
            return width
    return length


def tiles(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x with `dim` split into (tiles, width)."""
    width = tile_width(x.shape[dim])
    return x.unflatten(dim, (x.shape[dim] // width, width))


def tile_totals(x: torch.Tensor) -> torch.Tensor:
    """Sums over tiles of the last dimension: (..., N) to (..., T), in the accumulator dtype."""
    acc = accumulator(x.dtype)
    if x.dim() > 1 and x.mT.is_contiguous() and not x.is_contiguous():
        return tiles(x.mT, -2).sum(-2, dtype=acc).mT
    return tiles(x).sum(-1, dtype=acc)


def tile_energies(x: torch.Tensor) -> torch.Tensor:
    """Sums of squares over tiles of the last dimension: (..., N) to (..., T), in the accumulator dtype."""
    if x.device.type == "cpu" and x.is_contiguous():  # no squares in memory
        return torch.linalg.vector_norm(tiles(x), dim=-1, dtype=accumulator(x.dtype)).square()
    return tile_totals(x.to(accumulator(x.dtype)).square())


def tile_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Sums of magnitudes over tiles of the last dimension: (..., N) to (..., T), in the accumulator dtype."""
    if x.device.type == "cpu":
        # torch's 1-norm takes ten times as long there.
        return tile_totals(x.abs())
    return torch.linalg.vector_norm(tiles(x), ord=1, dim=-1, dtype=accumulator(x.dtype))


def underflow(terms: int, dtype: torch.dtype) -> float:
    """The most that a root of `terms` squares is too small by because squares vanish below the least normal number."""
    return math.sqrt(terms * torch.finfo(accumulator(dtype)).tiny)


def vanishing(dtype: torch.dtype) -> float:
    """The largest number that a device may take for 0: fp16's denormals are kept by all, other dtypes' are not."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)


def norms(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Euclidean norms along `dim`, -1 or -2, in the accumulator dtype; not below the true ones."""
    acc = accumulator(x.dtype)
    return torch.linalg.vector_norm(x, dim=dim, dtype=acc) + underflow(x.shape[dim], x.dtype)
