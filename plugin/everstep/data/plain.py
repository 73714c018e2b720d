"""States of data streams, as they travel between groups and into checkpoints: JSON, never a pickle.

Decoding makes numbers, text, bytes, arrays, lists, tuples and dicts and does nothing else, whoever made the bytes.
"""

import base64
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from everstep.run import typed
from everstep.run.typed import Count, UnfitError

_MAGIC = b"evrstrm3"
_OLDER = (b"evrstrm1", b"evrstrm2")
"""Their states are in formats that are not read any more."""
_DTYPES = {
    str(np.dtype(name)): np.dtype(name)
    for name in ("?", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8")
}


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands."""

    position: Count
    """Batches taken from it since its beginning."""

    state: Any
    """What its dataloader needs to go on there, as `plain` has it."""


def encode_states(states: dict[int, StreamState]) -> bytes:
    """`states` by stream number, as bytes that `decode_states` reads."""
    return _MAGIC + typed.dumps([[stream, known.position, known.state] for stream, known in sorted(states.items())])


def decode_states(data: bytes) -> dict[int, StreamState]:
    """The states in `data`; none in empty data, nor in data of an older version: a stream of which nothing is known is
    read from its beginning. Raises ValueError if it is no such data or cut off."""
    if not data or data[: len(_MAGIC)] in _OLDER:
        return {}
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("these are no stream states")
    try:
        found = typed.parse(list[tuple[Count, Count, Any]], typed.loads(data[len(_MAGIC) :], 1 << 32))
    except UnfitError as error:
        raise ValueError(f"these stream states are damaged: {error}") from error
    return {stream: StreamState(position, state) for stream, position, state in found}


def plain(value: Any, place: str = "state") -> Any:
    """`value` as what `typed.dumps` writes. Raises UnfitError, naming the place, for anything but None, bool, int,
    float, str, bytes, numpy arrays and tensors of numbers, and lists, tuples and dicts of these."""
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and abs(value) < 1 << 63):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _array(value, place)
    try:
        if kind in (list, tuple):
            items = [plain(item, f"{place}[{i}]"[:200]) for i, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
            return {"dict": [[plain(key), plain(item, f"{place}[{key!r}]"[:200])] for key, item in value.items()]}
    except RecursionError:
        raise UnfitError(f"{place[:200]} is nested too deeply") from None
    raise UnfitError(f"{place} is of type {kind.__module__}.{kind.__qualname__}, which is no plain value")


def _array(value: Any, place: str) -> Any:
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, RuntimeError) as error:  # bfloat16, sparse tensors
        raise UnfitError(f"{place} is a tensor that is no plain value: {error}") from error
    if str(array.dtype) not in _DTYPES:
        raise UnfitError(f"{place} is of type {array.dtype}, which is no plain value")
    if isinstance(value, np.generic):
        return plain(value.item(), place)
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    return {kind: [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]}


def restored(node: Any) -> Any:
    """The value that `plain` was given; tensors are on the CPU. Raises UnfitError."""
    try:
        return _restored(node)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnfitError(f"this is no plain value: {str(error)[:200]}") from error


def _restored(node: Any) -> Any:
    if isinstance(node, list):
        return [_restored(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    match kind:
        case "int":
            return int(content[:1000], 16)  # Python's own limit is for decimals
        case "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "tuple":
            return tuple(_restored(list(content)))
        case "dict":
            found = {_restored(key): _restored(item) for key, item in content}
            if not all(type(key) in (int, str) for key in found):
                raise ValueError("a key is neither text nor number")
            return found
        case "array" | "tensor":
            name, shape, raw = typed.parse(tuple[str, list[Count], Any], content)
            array = np.frombuffer(base64.b64decode(raw, validate=True), _DTYPES[name]).reshape(shape).copy()
            return torch.from_numpy(array) if kind == "tensor" else array
    raise ValueError(f"{ascii(kind)[:40]} is no kind of plain value")
