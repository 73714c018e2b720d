"""Poison slots: slots at which the workers of every group that computes them die.

`RUN_DIR/state/struck/STEP-SLOT/` has one empty file for each incarnation whose workers crashed at that slot. Whether a
slot is poison depends only on these files and the run's number of groups. So all groups agree on it, whenever they
start and on any batch system.
"""

import os
import re
from pathlib import Path

from everstep.run.directory import number_of_groups
from everstep.run.files import write_whole

DEATHS = 3
"""Deaths at a slot that make it poison, if they are of as many different groups (or of all, if the run has fewer)."""

Slot = tuple[int, int]
"""Step and slot."""
_STRUCK = re.compile(r"(?P<group>\d{1,9})\.\d+\.(?P<what>worked|new)")


def _place(run_dir: Path, slot: Slot) -> Path:
    return Path(run_dir) / "state" / "struck" / f"{slot[0]}-{slot[1]}"


def record_crash(run_dir: Path, slot: Slot, group: int, incarnation: int, *, worked: bool) -> None:
    """Record that workers of `group` crashed at this slot. `worked`: whether they had committed a step before."""
    name = f"{group}.{incarnation}.{'worked' if worked else 'new'}"
    write_whole(_place(run_dir, slot) / name)


def poisoned(run_dir: Path, slot: Slot) -> list[int]:
    """Return the groups whose workers crashed at a slot, once for each crash, if the slot is poison; else []. If none
    of the workers had ever committed a step, the slot is not to blame: they might crash at any slot."""
    try:
        names = os.listdir(_place(run_dir, slot))
    except OSError:
        return []
    told = [found for found in map(_STRUCK.fullmatch, names) if found]
    deaths = sorted(int(one["group"]) for one in told)
    enough = len(deaths) >= DEATHS and len({*deaths}) >= min(DEATHS, number_of_groups(run_dir) or DEATHS)
    return deaths if enough and any(one["what"] == "worked" for one in told) else []
