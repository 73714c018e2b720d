"""Input from outside, checked by type: JSON becomes dataclasses, or one sentence says what does not fit.

Messages of peers, files of the run directory and footers of token files are all parsed here. If one field is not of its
annotated type, the whole is refused. The only conversions are int to float, and array to tuple or set.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")

LONGEST_TEXT = 1 << 20
LARGEST_INT, LARGEST_WORD = 1 << 63, 1 << 64


class UnfitError(ValueError):
    """The input does not fit its type; the text is one sentence about the first such place.

    Attributes:
        wanted: the wanted type or range in words; "" if the error is not about one value.
        value: the value found instead.
        where: the place of the value in the input, for example `.groups[2]`.
        whole: what the input is, in words.
    """

    wanted, value, where, whole = "", None, "", ""

    def __str__(self) -> str:
        where, what = self.where.removeprefix("."), str(self.args[0])
        if not where:
            return f"{self.whole} {what}".strip()
        return (f"{self.whole}: " if self.whole else "") + (where + what if what.startswith(":") else f"{where} {what}")

    def lies_in(self, place: str) -> None:
        """Prefix `where` with the place of the enclosing value."""
        self.where = (place + self.where)[:200]


@dataclass(frozen=True)
class Within:
    """A mark for Annotated numbers: least <= value <= most."""

    least: float = -math.inf
    most: float = math.inf


Count = Annotated[int, Within(0)]
"""An int >= 0."""
Number = typing.NewType("Number", float)
"""A float that may be infinite or NaN, for instance a loss."""


def loads(text: str | bytes, limit: int = 64 << 20) -> Any:
    """Parse standard JSON. Raises UnfitError for text that is no JSON, NaN, Infinity, numbers too large for a float or
    for 64 bits, nesting that exhausts the stack, and text longer than `limit`."""
    if len(text) > limit:
        raise UnfitError(f"it is too long: {len(text)} bytes, at most {limit} are allowed")
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_moderate)
    except RecursionError:
        raise UnfitError("it is nested too deeply") from None
    except UnfitError:
        raise
    except ValueError as error:
        raise UnfitError(f"it is not JSON ({error})"[:200]) from None


def dumps(value: Any) -> bytes:
    """Return `value` as compact JSON for `loads`. Raises ValueError for NaN and Infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _no_constant(name: str) -> Any:
    raise UnfitError(f"{name} is not a number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise UnfitError(f"the number {text[:40]} is too large")
    return value


def _moderate(text: str) -> int:
    if len(text) > 20 or not -LARGEST_INT <= (value := int(text)) < LARGEST_WORD:
        raise UnfitError(f"the number {text[:40]} is too large")
    return value


def parse(kind: type[T], value: Any, whole: str = "") -> T:
    """Convert `value`, plain JSON, to the type `kind`: a dataclass, a builtin, or a `typing` combination of these.

    A dataclass is made from a JSON object of its fields. Other keys are refused; fields with a default may be missing.

    Raises:
        UnfitError: it does not fit. The text begins with `whole` and the place inside it.
    """
    try:
        return converter(kind)(value)
    except UnfitError as error:
        error.whole = whole
        raise


def _unfit(wanted: str, value: Any) -> UnfitError:
    error = UnfitError(f"should be {wanted}, is {ascii(value)[:60]}")
    error.wanted, error.value = wanted, value
    return error


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
    return _PLAIN[kind][0] if kind in _PLAIN else f"a {getattr(kind, '__name__', kind)}"


Converter = Callable[[Any], Any]
"""Converts a value or raises UnfitError. Enclosing converters add the place to the error: a value that fits is fast."""


@functools.cache
def converter(kind: Any) -> Converter:
    """Return the function by which `parse` converts to `kind`, for callers that parse many values of it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _bounded(converter(arguments[0]), [mark for mark in arguments[1:] if isinstance(mark, Within)])
    if origin in (typing.Union, types.UnionType):
        return _either([converter(member) for member in arguments], words(kind))
    if origin is Literal:
        return _plain(words(kind), lambda value: any(type(value) is type(one) and value == one for one in arguments))
    if origin is list:
        return _list(arguments[0])
    if origin is frozenset or (origin is tuple and arguments[-1] is Ellipsis):
        each = _list(arguments[0])
        return lambda value: origin(each(value))
    if origin is tuple:
        return _tuple([converter(member) for member in arguments])
    if origin is dict:
        return _dict(converter(arguments[1]))
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind))
    if kind is float:
        return _float
    if kind is Number:
        return lambda value: value if type(value) is float else _float(value)
    return _plain(words(kind), _PLAIN[kind][1] if kind in _PLAIN else lambda value: False)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer", lambda value: type(value) is int and -LARGEST_INT <= value < LARGEST_WORD),
    bool: ("true or false", lambda value: type(value) is bool),
    str: ("a string", lambda value: type(value) is str and len(value) <= LONGEST_TEXT),
    types.NoneType: ("null", lambda value: value is None),
    dict: ("a table", lambda value: type(value) is dict),
    list: ("an array", lambda value: type(value) in (list, tuple)),
    tuple: ("an array", lambda value: type(value) in (list, tuple)),
    float: ("a number", lambda value: type(value) is float),
    Number: ("a number", lambda value: type(value) is float),
    Any: ("any value", lambda value: True),
}
"""Type -> its name in words, and a test whether a value is of that type without conversion."""


def _plain(wanted: str, fits: Callable[[Any], bool]) -> Converter:
    def convert(value: Any) -> Any:
        if not fits(value):
            raise _unfit(wanted, value)
        return value

    return convert


_str, _object, _array = (_plain(*_PLAIN[kind]) for kind in (str, dict, list))


def _float(value: Any) -> float:
    if type(value) is int and abs(value) < 1 << 63:
        value = float(value)
    if type(value) is not float or not math.isfinite(value):
        raise _unfit("a number", value)
    return value


def _bounded(inner: Converter, marks: list[Within]) -> Converter:
    least, most = max(mark.least for mark in marks), min(mark.most for mark in marks)

    def convert(value: Any) -> Any:
        found = inner(value)
        if not least <= found <= most:
            raise _unfit(f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}", value)
        return found

    return convert


def _either(members: list[Converter], names: str) -> Converter:
    def convert(value: Any) -> Any:
        inside = None
        for member in members:
            try:
                return member(value)
            except UnfitError as error:
                inside = error if error.where else inside
        raise inside or _unfit(names, value)

    return convert


def _list(kind: Any) -> Converter:
    """Lists of ints are checked as a whole, for speed: every commit lists the owners of its slots, maybe a thousand."""
    member = converter(kind)
    bare, *marks = typing.get_args(kind) if typing.get_origin(kind) is Annotated else (kind,)
    bounds = [mark for mark in marks if isinstance(mark, Within)]
    least = max([-LARGEST_INT, *(mark.least for mark in bounds)])
    most = min([LARGEST_WORD - 1, *(mark.most for mark in bounds)])

    def convert(value: Any) -> list[Any]:
        if bare is int and {*map(type, _array(value))} == {int} and least <= min(value) and max(value) <= most:
            return [*value]
        return [_inside(i, member, item) for i, item in enumerate(_array(value))]

    return convert


def _tuple(members: list[Converter]) -> Converter:
    def convert(value: Any) -> tuple[Any, ...]:
        if len(_array(value)) != len(members):
            raise _unfit(f"an array of {len(members)}", value)
        return tuple(_inside(i, member, item) for i, (member, item) in enumerate(zip(members, value, strict=True)))

    return convert


def _dict(member: Converter) -> Converter:
    return lambda value: {_str(key): _inside(key, member, item) for key, item in _object(value).items()}


def _inside(place: int | str, member: Converter, item: Any) -> Any:
    """Convert an item of a larger value; an error gets the item's place."""
    try:
        return member(item)
    except UnfitError as error:
        error.lies_in(f"[{place}]" if isinstance(place, int) else f".{place}")
        raise


@functools.cache
def fields_of(kind: type) -> Converter:
    """Return a converter from a JSON object to a dataclass's field values by name. Any field may be missing."""
    hints = typing.get_type_hints(kind, include_extras=True)
    converters = {field.name: converter(hints[field.name]) for field in dataclasses.fields(kind) if field.init}

    def convert(value: Any) -> Any:
        if unknown := _object(value).keys() - converters.keys():
            raise UnfitError(f"has the unknown key {ascii(min(unknown, key=str))[:60]}")
        return {name: _inside(name, converters[name], item) for name, item in value.items()}

    return convert


def _dataclass(kind: type) -> Converter:
    fields, given = dataclasses.fields(kind), fields_of(kind)
    needed = {f.name for f in fields if f.init and f.default is f.default_factory is dataclasses.MISSING}

    def convert(value: Any) -> Any:
        found = given(value)
        if missing := needed - found.keys():
            raise UnfitError(f"has no {min(missing)}")
        try:
            return kind(**found)
        except ValueError as error:  # raised by the dataclass's __post_init__
            raise UnfitError(f": {error}") from error

    return convert
