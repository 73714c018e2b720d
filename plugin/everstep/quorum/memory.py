"""Whether a host has memory for copies, also when all ranks of a group ask at the same moment."""

import os

import psutil

FACTOR = 1.5
"""Free host memory, in sizes of what all ranks of a group here are to copy, that a copy needs."""


def has_room(nbytes: int) -> bool:
    """Whether this host has memory for a copy of so many bytes for each rank of this group on it. Each asks for all of
    them, so that not all see the same free bytes and take them at once."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return psutil.virtual_memory().available > FACTOR * ranks * nbytes
