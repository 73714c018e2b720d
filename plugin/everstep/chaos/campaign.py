"""Campaign files: which fault at which committed step or time, so that a campaign can be repeated.

seed = 7
spare_groups = [0]
[[fault]]
name = "stop-worker"
at_step = 12            # or at_s = 30.0, seconds after the first step
duration_s = 3.0        # and any other field of the fault
"""

import dataclasses
import difflib
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from everstep.chaos.fault import Fault
from everstep.chaos.registry import find
from everstep.chaos.schedule import Entry
from everstep.run.directory import LaunchError, read_toml

TIMING = ("at_step", "at_s", "patience_s")


@dataclass(frozen=True)
class Campaign:
    """A campaign file as it was read."""

    entries: list[Entry] = field(default_factory=list)
    seed: int = 0
    every: float | None = None
    jitter: bool = False
    faults: tuple[str, ...] = ()
    spare_groups: tuple[int, ...] = ()


def read_campaign(path: Path) -> Campaign:
    """The campaign of a TOML file. Raises LaunchError naming the file, the key and what would be right."""
    table = read_toml(path)
    entries = table.pop("fault", [])
    _known(table, [f.name for f in dataclasses.fields(Campaign) if f.name != "entries"], f"{path}")
    _typed(table, get_type_hints(Campaign), f"{path}")
    if not isinstance(entries, list) or not (entries or "every" in table):
        raise LaunchError(f"{path}: a campaign needs [[fault]] entries, or every = SECONDS.")
    read = [_entry(entry, f"{path}, [[fault]] number {number}") for number, entry in enumerate(entries, start=1)]
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in table.items()
    }
    find(settings.get("faults", ()))
    return Campaign(read, **settings)


def _entry(table: dict[str, Any], where: str) -> Entry:
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise LaunchError(f"{where}: name = FAULT is missing.")
    (kind,) = find([name])
    fields = [f.name for f in dataclasses.fields(kind)]
    where = f"{where} ({name})"
    _known(table, [*TIMING, *fields], where)
    if ("at_step" in table) == ("at_s" in table):
        raise LaunchError(f"{where}: give either at_step or at_s.")
    hints = get_type_hints(kind) | {"at_step": int, "at_s": float, "patience_s": float}
    _typed(table, hints, where)
    timing = {key: table.pop(key) for key in TIMING if key in table}
    return Entry(kind(**table), **timing)


def make(names: Iterable[str]) -> list[Fault]:
    """One fault of each of these kinds, as they are without settings."""
    return [kind() for kind in find(names)]


def _known(table: dict[str, Any], keys: list[str], where: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1, cutoff=0.0)[0]
            raise LaunchError(f"{where}: unknown key {key}, did you mean {near}?")


def _typed(table: dict[str, Any], hints: dict[str, Any], where: str) -> None:
    for key, value in table.items():
        hint = hints[key]
        kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        plain = [list if get_args(kind) else kind for kind in kinds]
        fits = isinstance(value, tuple(plain)) or (float in plain and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in plain):
            wanted = " or ".join(kind.__name__ for kind in plain if kind is not type(None))
            raise LaunchError(f"{where}: {key} = {value!r} should be of type {wanted}.")
