"""Values that consist of numbers, text, bytes, arrays, lists and dicts, as bytes: what a dataloader's state may be.

A JSON header, then the bytes and arrays that it refers to. Decoding makes values of these types and does nothing else,
whoever made the bytes.
"""

import math
import struct
from typing import Any

import numpy as np
import torch

from everstep.run import typed

_MAGIC = b"evrplai1"
_HEAD = struct.Struct("<8sI")
DEPTH = 50
_DTYPES = {
    str(np.dtype(name)): np.dtype(name)
    for name in ("?", *(f"{k}{n}" for k in "iu" for n in (1, 2, 4, 8)), "f2", "f4", "f8")
}


class PlainError(ValueError):
    """A value that is not plain, or bytes that are no plain value; in one sentence."""


def encode(value: Any) -> bytes:
    """`value` as bytes. Raises PlainError, naming the place, for anything but None, bool, int, float, str, bytes, numpy
    arrays and tensors of numbers, and lists, tuples and dicts of these."""
    blobs: list[bytes] = []
    header = typed.dumps(_encode(value, "state", blobs, DEPTH))
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *blobs])


def decode(data: bytes) -> Any:
    """The value that `encode` was given; tensors are on the CPU. Raises PlainError."""
    try:
        magic, length = _HEAD.unpack_from(data)
        if magic != _MAGIC or length > len(data) - _HEAD.size:
            raise PlainError("these bytes are no plain value")
        begin = _HEAD.size + length
        value, end = _decode(typed.loads(data[_HEAD.size : begin]), data, begin, DEPTH)
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlainError(f"these bytes are no plain value: {error}") from error
    if end != len(data):
        raise PlainError(f"a plain value of {end} bytes is followed by {len(data) - end} more")
    return value


def _encode(value: Any, place: str, blobs: list[bytes], depth: int) -> Any:
    if depth == 0:
        raise PlainError(f"{place} is nested too deeply")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if kind is torch.Tensor:
        try:
            array = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse tensors
            raise PlainError(f"{place} is a tensor that is no plain value: {error}") from error
        return {"tensor": _encode(array, place, blobs, depth - 1)}
    if kind is np.ndarray and str(value.dtype) in _DTYPES:
        blobs.append(np.ascontiguousarray(value).tobytes())
        return {"array": [str(value.dtype), list(value.shape)]}
    if isinstance(value, np.generic) and str(value.dtype) in _DTYPES:
        return _encode(value.item(), place, blobs, depth)
    if kind is list:
        return [_encode(item, f"{place}[{i}]", blobs, depth - 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_encode(item, f"{place}[{i}]", blobs, depth - 1) for i, item in enumerate(value)]}
    if isinstance(value, dict) and all(map(_is_key, value)):
        items = [[key, _encode(item, f"{place}[{key!r}]"[:200], blobs, depth - 1)] for key, item in value.items()]
        return {"dict": items}
    raise PlainError(f"{place} is of type {kind.__module__}.{kind.__qualname__}, which is no plain value")


def _is_key(key: Any) -> bool:
    return type(key) is str or (type(key) is int and -(1 << 63) <= key < 1 << 63)


def _decode(node: Any, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """The value of a node, and where the bytes of the next one begin."""
    if depth == 0:
        raise PlainError("it is nested too deeply")
    if isinstance(node, list):
        values = []
        for item in node:
            value, at = _decode(item, data, at, depth - 1)
            values.append(value)
        return values, at
    if not isinstance(node, dict):
        return node, at
    ((kind, content),) = node.items()
    match kind:
        case "int":
            if len(content) > 1000:  # Python's own limit is for decimals
                raise PlainError("an integer is too long")
            return int(content, 16), at
        case "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content], at
        case "bytes":
            return _take(data, at, content)
        case "array":
            name, shape = typed.parse(tuple[str, list[typed.Count]], content)
            dtype = _DTYPES.get(name)
            if dtype is None:
                raise PlainError(f"{name[:40]} is no type of numbers")
            raw, at = _take(data, at, math.prod(shape) * dtype.itemsize)
            return np.frombuffer(raw, dtype).reshape(shape).copy(), at
        case "tensor":
            array, at = _decode(content, data, at, depth - 1)
            return torch.from_numpy(array), at
        case "tuple":
            values, at = _decode(list(content), data, at, depth - 1)
            return tuple(values), at
        case "dict":
            found = {}
            for key, item in content:
                if not _is_key(key):
                    raise PlainError("a key is neither text nor number")
                found[key], at = _decode(item, data, at, depth - 1)
            return found, at
    raise PlainError(f"{ascii(kind)[:40]} is no kind of plain value")


def _take(data: bytes, at: int, size: Any) -> tuple[bytes, int]:
    if type(size) is not int or not 0 <= size <= len(data) - at:
        raise PlainError("it is cut off")
    return bytes(data[at : at + size]), at + size
