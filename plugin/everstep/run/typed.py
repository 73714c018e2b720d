"""What comes from outside, by type: JSON to dataclasses, or one sentence about what does not fit.

Every door of a run uses this one way: messages of peers, files of the run directory, footers and journals of token
files, events. A field is what its annotation says, or the whole is refused; nothing is converted but an int to a float.
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
LARGEST_INT = 1 << 63


class UnfitError(ValueError):
    """A value that is not what was due, in one sentence.

    Attributes:
        wanted: what was due, in words; "" if it is not the value that is wrong.
        value: what was there.
        where: the place inside of what was parsed.
    """

    wanted, value, where = "", None, ""


@dataclass(frozen=True)
class Within:
    """For Annotated numbers: least <= value <= most. For strings and lists: of their length."""

    least: float = -math.inf
    most: float = math.inf


Count = Annotated[int, Within(0)]
"""An int that cannot be negative."""
Number = typing.NewType("Number", float)
"""A float that may be infinite or not a number, as a loss."""


def loads(text: str | bytes, limit: int = 64 << 20) -> Any:
    """JSON, as the standard has it: no NaN, no Infinity, no number that a float or 64 bits cannot hold, no nesting that
    exhausts the stack. Raises UnfitError."""
    if len(text) > limit:
        raise UnfitError(f"{len(text)} bytes are more than the {limit} that can be meant")
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_moderate)
    except RecursionError:
        raise UnfitError("it is nested too deeply") from None
    except UnfitError:
        raise
    except ValueError as error:
        raise UnfitError(f"it is not JSON ({error})"[:200]) from None


def dumps(value: Any) -> bytes:
    """What `loads` reads. Raises ValueError for NaN and Infinity."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _no_constant(name: str) -> Any:
    raise UnfitError(f"{name} is no number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise UnfitError(f"the number {text[:40]} is too large")
    return value


def _moderate(text: str) -> int:
    if len(text) > 20 or not -LARGEST_INT <= (value := int(text)) < 2 * LARGEST_INT:
        raise UnfitError(f"the number {text[:40]} is too large")
    return value


def parse(kind: type[T], value: Any, where: str = "") -> T:
    """`value`, plain JSON, as a `kind`: a dataclass, a builtin, or what typing makes of these.

    A dataclass is made of an object with its fields, no other keys, and those that have a default may be missing.

    Raises:
        UnfitError: it does not fit; begins with `where` and the place inside.
    """
    return _converter(kind)(value, where)


def _unfit(where: str, wanted: str, value: Any) -> UnfitError:
    error = UnfitError(f"{where + ' ' if where else ''}should be {wanted}, is {ascii(value)[:60]}")
    error.where, error.wanted, error.value = where, wanted, value
    return error


def words(kind: Any) -> str:
    """A type in a user's words: `an integer`, `one of "a", "b"`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return words(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words(member) for member in arguments if not (member is int and float in arguments))
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"an array, each element {words(arguments[0])}"
    if origin is tuple:
        return f"an array of {len(arguments)}: " + ", ".join(map(words, arguments))
    if origin is dict or dataclasses.is_dataclass(kind):
        return "a table"
    return _PLAIN[kind][0] if kind in _PLAIN else f"a {getattr(kind, '__name__', kind)}"


Converter = Callable[[Any, str], Any]


@functools.cache
def _converter(kind: Any) -> Converter:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _bounded(_converter(arguments[0]), [mark for mark in arguments[1:] if isinstance(mark, Within)])
    if origin in (typing.Union, types.UnionType):
        return _either([_converter(member) for member in arguments], words(kind))
    if origin is Literal:
        return _plain(words(kind), lambda value: any(type(value) is type(one) and value == one for one in arguments))
    if origin is list:
        return _list(_converter(arguments[0]))
    if origin is tuple and arguments[-1] is Ellipsis:
        each = _list(_converter(arguments[0]))
        return lambda value, where: tuple(each(value, where))
    if origin is tuple:
        return _tuple([_converter(member) for member in arguments])
    if origin is dict:
        return _dict(_converter(arguments[1]))
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind))
    if kind is float:
        return _float
    if kind is Number:
        return lambda value, where: value if type(value) is float else _float(value, where)
    return _plain(words(kind), _PLAIN[kind][1] if kind in _PLAIN else lambda value: False)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer", lambda value: type(value) is int and -LARGEST_INT <= value < 2 * LARGEST_INT),
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
"""Types that take a value as it is: in words, and whether it is one."""


def _plain(wanted: str, fits: Callable[[Any], bool]) -> Converter:
    def convert(value: Any, where: str) -> Any:
        if not fits(value):
            raise _unfit(where, wanted, value)
        return value

    return convert


_str, _object, _array = (_plain(*_PLAIN[kind]) for kind in (str, dict, list))


def _float(value: Any, where: str) -> float:
    if type(value) is int and abs(value) < 1 << 63:
        value = float(value)
    if type(value) is not float or not math.isfinite(value):
        raise _unfit(where, "a number", value)
    return value


def _bounded(inner: Converter, marks: list[Within]) -> Converter:
    def convert(value: Any, where: str) -> Any:
        found = inner(value, where)
        size = found if isinstance(found, int | float) else len(found)
        for mark in marks:
            if not mark.least <= size <= mark.most:
                raise _unfit(where, f"from {mark.least} to {mark.most}", value)
        return found

    return convert


def _either(members: list[Converter], names: str) -> Converter:
    def convert(value: Any, where: str) -> Any:
        for member in members:
            try:
                return member(value, where)
            except UnfitError:
                continue
        raise _unfit(where, names, value)

    return convert


def _list(member: Converter) -> Converter:
    return lambda value, where: [member(item, f"{where}[{i}]") for i, item in enumerate(_array(value, where))]


def _tuple(members: list[Converter]) -> Converter:
    def convert(value: Any, where: str) -> tuple[Any, ...]:
        if len(_array(value, where)) != len(members):
            raise _unfit(where, f"an array of {len(members)}", value)
        return tuple(member(item, f"{where}[{i}]") for i, (member, item) in enumerate(zip(members, value, strict=True)))

    return convert


def _dict(member: Converter) -> Converter:
    return lambda value, where: {
        _str(key, where): member(item, f"{where}.{key}"[:200]) for key, item in _object(value, where).items()
    }


def _dataclass(kind: type) -> Converter:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    converters = {name: _converter(hints[name]) for name in fields}
    needed = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def convert(value: Any, where: str) -> Any:
        if unknown := _object(value, where).keys() - fields.keys():
            raise UnfitError(f"{where} has the unknown key {ascii(min(unknown, key=str))[:60]}".strip())
        if missing := needed - value.keys():
            raise UnfitError(f"{where} has no {min(missing)}".strip())
        given = {name: converters[name](item, f"{where}.{name}".lstrip(".")) for name, item in value.items()}
        try:
            return kind(**given)
        except ValueError as error:  # of its own __post_init__
            raise UnfitError(f"{where}: {error}") from error

    return convert
