"""Slots that end the workers of whoever computes them, as the agents of a run tell each other.

`RUN_DIR/state/struck/STEP-SLOT/` has an empty file for each start of a group that ended there of its own doing. Whether
a slot is poison is read from nothing else: it holds for every group, whoever starts when, and on every batch system.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from everstep.run.files import write_whole

DEATHS = 3
"""So many, of as many groups where there are as many, are the slot's doing."""

Slot = tuple[int, int]
"""Step and slot."""


@dataclass(frozen=True)
class Deaths:
    """Whose workers ended at a slot: `deaths` by group; `worked` of them had committed steps before."""

    deaths: Counter[int]
    worked: int

    def poisoned(self, groups: int) -> bool:
        """Whether it is the slot that ends them, in a run of `groups`. Workers that never committed a step would end at
        every slot, and name none."""
        return self.deaths.total() >= DEATHS and len(self.deaths) >= min(DEATHS, groups) and self.worked > 0


def _place(run_dir: Path, slot: Slot) -> Path:
    return Path(run_dir) / "state" / "struck" / f"{slot[0]}-{slot[1]}"


def strike(run_dir: Path, slot: Slot, group: int, incarnation: int, *, worked: bool) -> None:
    """Workers of `group` ended at this slot of their own doing; `worked`: after they had committed a step."""
    name = f"{group}.{incarnation}.{'worked' if worked else 'new'}"
    write_whole(_place(run_dir, slot) / name)


def deaths_at(run_dir: Path, slot: Slot) -> Deaths:
    """Who ended at a slot so far."""
    try:
        names = os.listdir(_place(run_dir, slot))
    except OSError:
        names = []
    told = [parts for parts in (name.split(".") for name in names) if len(parts) == 3 and parts[0].isdecimal()]
    return Deaths(Counter(int(group) for group, _, _ in told), sum(what == "worked" for _, _, what in told))


def first_to_tell(run_dir: Path, slot: Slot) -> bool:
    """Whether nobody has told of this slot yet; True for one caller only, of all agents."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(_place(run_dir, slot) / "told", flags, 0o644))
    except FileExistsError:
        return False
    return True
