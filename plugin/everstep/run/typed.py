"""Input from outside, checked by type: JSON becomes dataclasses, or one sentence says what does not fit.

Messages of peers, files of the run directory and footers of token files are all parsed here, by pydantic. If one field
is not of its annotated type, the whole is refused. The only conversions are int to float, and array to tuple or set.
"""

import dataclasses
import functools
import json
import types
import typing
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import from_json

T = TypeVar("T")

_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
LARGEST_INT, LARGEST_WORD = 1 << 63, 1 << 64
Whole = Annotated[int, Field(ge=-LARGEST_INT, lt=LARGEST_WORD)]
Count = Annotated[int, Field(ge=0, lt=LARGEST_WORD)]
"""An int >= 0."""
Number = Annotated[float, Field(allow_inf_nan=True)]
"""A float that may be infinite or NaN, for instance a loss."""
_SAID = {"missing": "is missing", "unexpected_keyword_argument": "is no known key"}
"""Type of pydantic's error -> what to say, if its own message would read badly."""


class UnfitError(ValueError):
    """The input does not fit its type; the text is one sentence about the first such place."""


def loads(text: str | bytes) -> Any:
    """Parse standard JSON. Raises UnfitError for text that is no JSON, NaN, Infinity, and nesting deeper than 200. A
    number beyond the range of floats becomes infinite, which `parse` refuses. Who receives the text limits its size."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise UnfitError(f"it is not JSON ({error})"[:200]) from None


def dumps(value: Any) -> bytes:
    """Return `value` as compact JSON for `loads`. Raises ValueError for NaN and Infinity."""
    return _COMPACT.encode(value).encode()


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(list[kind], config=STRICT)  # of a list, as pydantic accepts no `config` for a dataclass


def parse(kind: type[T], value: Any, whole: str = "it") -> T:
    """Convert `value`, plain JSON, to the type `kind`: a dataclass, a builtin, or a `typing` combination of these.

    A dataclass is made from a JSON object of its fields. Other keys are refused; fields with a default may be missing.

    Raises:
        UnfitError: it does not fit. The text begins with `whole` and the place inside it.
    """
    try:
        return _adapter(kind).validate_json(dumps([value]))[0]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"][1:])[:200]
        wanted = first["msg"].removeprefix("Input ").replace("greater than or equal to", "at least")
        said = _SAID.get(first["type"]) or f"{wanted}, is {ascii(first['input'])[:60]}"
        raise UnfitError(f"{whole}{': ' * bool(place)}{place.removeprefix('.')} {said}") from None
    except (TypeError, ValueError, RecursionError, PydanticSchemaGenerationError) as error:
        raise UnfitError(f"{whole} cannot be checked: {error}"[:200]) from None


def words(kind: Any) -> str:
    """Return a type in a user's words, such as `an integer` or `one of "a", "b"`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return words(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words(member) for member in arguments if not (member is int and float in arguments))
    if origin in (list, frozenset) or (origin is tuple and arguments[-1] is Ellipsis):
        return f"an array, each element {words(arguments[0])}"
    if origin is tuple:
        return f"an array of {len(arguments)}: " + ", ".join(map(words, arguments))
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a table"
    return _PLAIN.get(kind) or f"a {getattr(kind, '__name__', kind)}"


_PLAIN = {
    int: "an integer", bool: "true or false", str: "a string", types.NoneType: "null", dict: "a table",
    list: "an array", tuple: "an array", float: "a number", Any: "any value",
}  # fmt: skip
"""Type -> its name in words."""
