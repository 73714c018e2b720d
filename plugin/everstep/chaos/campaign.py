"""Campaign files: which fault comes at which committed step or time, so that a campaign can be repeated.

seed = 7
[[fault]]
name = "stop-worker"
at_step = 12            # or at_s = 30.0, seconds after the first step
duration_s = 3.0        # and any other field of the fault
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from everstep.chaos.fault import Fault
from everstep.chaos.kinds import FAULTS, OF_SOME, require_kinds
from everstep.config.errors import ConfigError
from everstep.config.source import read_source
from everstep.run import typed
from everstep.run.directory import LaunchError


@dataclass(frozen=True)
class Campaign:
    """A campaign file."""

    fault: list[dict[str, Any]]
    """The [[fault]] tables as written."""
    seed: int = 0
    faults: list[Fault] = field(default_factory=list, init=False)


def read_campaign(path: Path) -> Campaign:
    """Read a campaign from a TOML file. Raises LaunchError that names the file, the key and what would be right."""
    try:
        campaign = typed.parse(Campaign, read_source(path).table, f"{path}")
        for number, table in enumerate(campaign.fault, start=1):
            campaign.faults.append(_fault(table, f"{path}, fault {number}"))
    except (ConfigError, typed.UnfitError) as error:
        raise LaunchError(f"{error}.") from None
    return campaign


def _fault(table: dict[str, Any], where: str) -> Fault:
    name = typed.parse(str, table.get("name", ""), f"{where}, name")
    require_kinds([name])
    where = f"{where} ({name})"
    if foreign := OF_SOME & table.keys() - FAULTS[name].has:
        known = {item.name for item in fields(Fault)} - OF_SOME | FAULTS[name].has
        raise LaunchError(f"{where} has the unknown key {min(foreign)!r}; its keys are {', '.join(sorted(known))}.")
    fault = typed.parse(Fault, table, where)
    if (fault.at_step is None) == (fault.at_s is None):
        raise LaunchError(f"{where}: give either at_step or at_s.")
    if fault.rank is not None and fault.rank < 0:
        raise LaunchError(f"{where}: rank should be at least 0, is {fault.rank}.")
    if fault.group is not None and fault.count > 1:
        raise LaunchError(f"{where}: give either group or count, as several groups are drawn.")
    return fault
