"""All kinds of faults, by name."""

import difflib
from collections.abc import Iterable

from everstep.chaos import hosts, orders, processes, rounds, storage
from everstep.chaos.fault import Fault
from everstep.run.directory import LaunchError

KINDS: tuple[type[Fault], ...] = (*processes.KINDS, *hosts.KINDS, *orders.KINDS, *storage.KINDS, *rounds.KINDS)

FAULTS: dict[str, type[Fault]] = {kind.name: kind for kind in KINDS}


def find(names: Iterable[str]) -> list[type[Fault]]:
    """The kinds of these names. Raises LaunchError with the nearest name for one that is unknown."""
    found = []
    for name in names:
        if name not in FAULTS:
            near = difflib.get_close_matches(name, FAULTS, 1, cutoff=0.0)[0]
            raise LaunchError(f"there is no fault {name}, did you mean {near}? All: {', '.join(sorted(FAULTS))}.")
        found.append(FAULTS[name])
    return found
