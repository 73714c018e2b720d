"""Parses every command line with tyro, and reports an error as one sentence.

tyro itself would print a panel and exit. `private.errors` has the cause of an error as values instead.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import tyro

from everstep.run.typed import words

from .errors import ConfigError, nearest
from .private import errors

ROOT_KEYS = ("dump_folder", "hf_assets_path")
"""torchtitan's flags that belong to no section."""


def is_flag(word: str) -> bool:
    """Return whether a word of a command line is a flag, and not a negative number or a value."""
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
    """Parse `args` into an instance of `kind`, a dataclass. Return it with the unknown arguments.

    Args:
        default: an instance with the values of flags that are not given; None: the dataclass's defaults.
        registry: tyro's rules for types.
        known: names of all flags (`section.key`). An unknown argument is then refused, with the nearest flag. None:
            unknown arguments are returned.

    Raises:
        ConfigError: an argument is missing, unknown, or has a value of the wrong type.
    """
    args = list(args)

    def refuse(event: errors.ParseErrorEvent) -> None:
        raise ConfigError(_sentence(event, args, list(known or ())))

    more: dict[str, Any] = {"registry": registry} | ({} if default is None else {"default": default})
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
            return f"--{name} is not a flag: set it in the file"
        near = nearest(name, known)
        return f"there is no flag {flag}" + (f", the nearest is --{near}" if near else "")
    if isinstance(event, errors.InvalidChoice):
        return f"{_name(event.argument)} must be one of {', '.join(event.choices)}, got {event.value}"
    if isinstance(event, errors.BadValue) and event.reason == "too_few_values":
        return f"{_name(event.argument)} needs a value: {_wanted(event.argument)}"
    if isinstance(event, errors.InstantiationFailure) and event.argument is not None:
        return f"{_name(event.argument)} must be {_wanted(event.argument)}"
    message = getattr(event, "message", "") or type(event).__name__
    return str(message).splitlines()[0]


def _stray(word: str, args: Sequence[str]) -> str:
    """Return the error message for a word that belongs to no flag, e.g. `true` after a switch."""
    parts = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    before = parts[parts.index(word) - 1] if word in parts[1:] else ""
    section, dot, key = before.lstrip("-").rpartition(".")
    if not before.startswith("--"):
        return f"{word} belongs to no flag"
    return f"{before} takes no value: it switches on; --{section}{dot}no-{key} switches off"


def _name(argument: Any) -> str:
    name = argument.display_name()
    return name if name.startswith("-") else name.upper()


def _wanted(argument: Any) -> str:
    return words(argument.field.type).removesuffix(" or null")
