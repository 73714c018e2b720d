"""One grammar for everything on a command line, tyro's; what it refuses is told in one sentence.

tyro prints a panel and exits. Its own errors say what was wrong as values.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import tyro

from everstep.run.typed import words

from .errors import ConfigError, nearest
from .private import errors

T = TypeVar("T")

ROOT_KEYS = ("dump_folder", "hf_assets_path")
"""torchtitan's flags without a section."""


def is_flag(word: str) -> bool:
    """Whether a word of a command line begins a flag, and is no negative number."""
    return word.startswith("-") and not re.fullmatch(r"-[\d.].*", word)


def parse(
    kind: Any,
    args: Sequence[str],
    *,
    prog: str = "",
    default: Any = None,
    registry: Any = None,
    known: Iterable[str] | None = None,
) -> tuple[Any, list[str]]:
    """`kind` (a dataclass) as `args` say, and the arguments that it does not know.

    Args:
        default: the values of what is not given; None: the dataclass's own.
        registry: tyro's rules for types.
        known: names of all flags (`section.key`), to refuse what is unknown with the nearest one; None: unknown
            arguments are returned.

    Raises:
        ConfigError: an argument is missing, unknown, or has a value of the wrong kind.
    """
    args = list(args)

    def refuse(event: errors.ParseErrorEvent) -> None:
        raise ConfigError(_sentence(event, args, list(known or ())))

    more: dict[str, Any] = {} if default is None else {"default": default}
    if registry is not None:
        more["registry"] = registry
    with errors.on_parse_error(refuse):
        if known is not None:
            return tyro.cli(kind, args=args, prog=prog or None, **more), []
        return tyro.cli(kind, args=args, prog=prog or None, return_unknown_args=True, **more)


def _sentence(event: errors.ParseErrorEvent, args: Sequence[str], known: Sequence[str]) -> str:
    if isinstance(event, errors.MissingArgs):
        names = ", ".join(_name(found.arg) for found in event.missing_arguments)
        return f"{names} is missing; see --help"
    if isinstance(event, errors.UnrecognizedArgs):
        flag = next((token for token in event.tokens if token.startswith("-")), "")
        if not flag:
            return _stray(event.tokens[0], args)
        name = flag.lstrip("-").partition("=")[0].replace("-", "_")
        if name in known:
            return f"--{name} is no flag: it is set in the file alone"
        near = nearest(name, known)
        return f"there is no flag {flag}" + (f", the nearest is --{near}" if near else "")
    if isinstance(event, errors.InvalidChoice):
        return f"{_name(event.argument)} must be one of {', '.join(event.choices)}, got {event.value}"
    if isinstance(event, errors.BadValue) and event.reason == "too_few_values":
        return f"{_name(event.argument)} needs a value: {_wanted(event.argument)}"
    if isinstance(event, errors.InstantiationFailure) and event.argument is not None:
        name = _name(event.argument)
        given = _given(event.argument.lowered.name_or_flags, args)
        return f"{name} must be {_wanted(event.argument)}" + (f", got {given}" if given is not None else "")
    message = getattr(event, "message", "") or type(event).__name__
    return str(message).splitlines()[0]


def _stray(word: str, args: Sequence[str]) -> str:
    """What to say of a word that belongs to no flag, a switch's value for instance."""
    attached = next(
        (arg.removesuffix(f"={word}") for arg in args if arg.startswith("--") and arg.endswith(f"={word}")), ""
    )
    before = attached or (args[args.index(word) - 1] if word in args[1:] else "")
    section, dot, key = before.lstrip("-").rpartition(".")
    if not before.startswith("--") or "=" in before:
        return f"{word} belongs to no flag"
    return f"{before} takes no value: it is on when it is there, and --{section}{dot}no-{key} is off"


def _name(argument: Any) -> str:
    name = argument.display_name()
    return name if name.startswith("-") else name.upper()


def _wanted(argument: Any) -> str:
    return words(argument.field.type).removesuffix(" or null")


def _given(flags: Sequence[str], args: Sequence[str]) -> str | None:
    """The last value that one of these flags was given."""
    names = {flag.replace("-", "_") for flag in flags}
    value = None
    for position, arg in enumerate(args):
        key, equals, attached = arg.partition("=")
        if key.replace("-", "_") in names:
            value = attached if equals else args[position + 1] if position + 1 < len(args) else None
    return value
