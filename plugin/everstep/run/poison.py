"""Slots that end the workers of whoever computes them, as the agents of a run tell each other.

`RUN_DIR/state/struck/STEP-SLOT/` has an empty file for each start of a group that ended there of its own doing. Whether
a slot is poison is read from nothing else: it holds for every group, whoever starts when, and on every batch system.
"""

import os
import re
from pathlib import Path

from everstep.run.directory import number_of_groups
from everstep.run.files import write_whole

DEATHS = 3
"""So many, of as many groups where there are as many, are the slot's doing."""

Slot = tuple[int, int]
"""Step and slot."""
_STRUCK = re.compile(r"(?P<group>\d{1,9})\.\d+\.(?P<what>worked|new)")


def _place(run_dir: Path, slot: Slot) -> Path:
    return Path(run_dir) / "state" / "struck" / f"{slot[0]}-{slot[1]}"


def strike(run_dir: Path, slot: Slot, group: int, incarnation: int, *, worked: bool) -> None:
    """Workers of `group` ended at this slot of their own doing; `worked`: after they had committed a step."""
    name = f"{group}.{incarnation}.{'worked' if worked else 'new'}"
    write_whole(_place(run_dir, slot) / name)


def poisoned(run_dir: Path, slot: Slot) -> list[int]:
    """Whose workers ended at a slot, each group as often as they did, if it is the slot that ends them; else nobody's.
    Workers that never committed a step would end at every slot: they name none."""
    try:
        names = os.listdir(_place(run_dir, slot))
    except OSError:
        return []
    told = [found for found in map(_STRUCK.fullmatch, names) if found]
    deaths = sorted(int(one["group"]) for one in told)
    enough = len(deaths) >= DEATHS and len({*deaths}) >= min(DEATHS, number_of_groups(run_dir) or DEATHS)
    return deaths if enough and any(one["what"] == "worked" for one in told) else []
