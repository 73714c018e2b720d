"""States of data streams as JSON, never pickles, for exchange between replica groups and for checkpoints.

Decoding only makes numbers, text, bytes, arrays, tensors, lists, tuples and dicts, even from bytes of an attacker.
"""

import base64
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from everstep.run import typed
from everstep.run.typed import Count, UnfitError

_MAGIC = b"evrstrm4"
_OLDER = (b"evrstrm1", b"evrstrm2", b"evrstrm3")
"""Magic bytes of older formats, which are not read any more."""
LONGEST_INT = 4000
"""Most bits of an integer. Python converts a decimal number of at most 4300 digits."""
_DTYPES = {
    str(np.dtype(name)): np.dtype(name)
    for name in ("?", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8")
}


@dataclass(frozen=True)
class StreamState:
    """The position of a stream, and the state of its dataloader there."""

    position: Count
    """Number of batches read from the beginning of the stream."""

    state: Any
    """The dataloader's state in the form that `to_plain` returns and `from_plain` reads."""


def encode_states(states: dict[int, StreamState]) -> bytes:
    """Return `states`, by stream number, as bytes for `decode_states`."""
    return _MAGIC + typed.dumps([[stream, known.position, known.state] for stream, known in sorted(states.items())])


def decode_states(data: bytes) -> dict[int, StreamState]:
    """Return the states in `data`, by stream number. Empty data and data of older formats have none: a stream then
    skips from its beginning to the wanted batch, which takes time but changes no batch. Raises ValueError if `data` is
    something else, damaged or cut off."""
    if not data or data[: len(_MAGIC)] in _OLDER:
        return {}
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("the data are not stream states")
    try:
        found = typed.parse(list[tuple[Count, Count, Any]], typed.loads(data[len(_MAGIC) :]))
    except UnfitError as error:
        raise ValueError(f"the stream states are damaged: {error}") from error
    return {stream: StreamState(position, state) for stream, position, state in found}


def to_plain(value: Any, place: str = "state") -> Any:
    """Convert `value` to a form for `typed.dumps`. Raises UnfitError, which names `place`, for anything but None, bool,
    int, float, str, bytes, numpy arrays and tensors of numbers, lists, tuples, and dicts whose keys are int or str. A
    numpy scalar becomes a Python scalar, and a subclass of dict a dict."""
    kind = type(value)
    if kind is int and value.bit_length() > LONGEST_INT:
        raise UnfitError(f"{place} is an integer of more than {LONGEST_INT} bits")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _array(value, place)
    try:
        if kind is list and all(type(item) is int and item.bit_length() <= LONGEST_INT for item in value):
            return [*value]  # a buffer of many tokens: a place for each would take seconds
        if kind in (list, tuple):
            items = [to_plain(item, f"{place}[{i}]"[:200]) for i, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
            return {"dict": [[to_plain(key), to_plain(item, f"{place}[{key!r}]"[:200])] for key, item in value.items()]}
    except RecursionError:
        raise UnfitError(f"{place[:200]} is nested too deeply") from None
    raise UnfitError(f"{place} is of type {kind.__module__}.{kind.__qualname__}, which states must not contain")


def _array(value: Any, place: str) -> Any:
    try:
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, RuntimeError) as error:  # bfloat16, sparse tensors
        raise UnfitError(f"{place} is a tensor that states must not contain: {error}") from error
    if str(array.dtype) not in _DTYPES:
        raise UnfitError(f"{place} is of type {array.dtype}, which states must not contain")
    if isinstance(value, np.generic):
        return to_plain(value.item(), place)
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    return {kind: [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]}


def from_plain(node: Any) -> Any:
    """Return the value that `to_plain` converted, with tensors on the CPU. Raises UnfitError."""
    try:
        return _from_plain(node)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnfitError(f"the state is damaged: {str(error)[:200]}") from error


def _from_plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_from_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    match kind:
        case "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "tuple":
            return tuple(_from_plain(list(content)))
        case "dict":
            found = {_from_plain(key): _from_plain(item) for key, item in content}
            if not all(type(key) in (int, str) for key in found):
                raise ValueError("a key is neither a string nor an integer")
            return found
        case "array" | "tensor":
            name, shape, raw = typed.parse(tuple[str, list[Count], Any], content)
            array = np.frombuffer(base64.b64decode(raw, validate=True), _DTYPES[name]).reshape(shape).copy()
            return torch.from_numpy(array) if kind == "tensor" else array
    raise ValueError(f"unknown kind of value {ascii(kind)[:40]}")
