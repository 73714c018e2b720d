"""Where a rank's host is, as a number that sorts neighbours together: what hosts that fail together have in common."""

import zlib
from collections.abc import Mapping

HOST_BITS, SWITCH_BITS = 15, 15
"""A host and two switches fit, with the bits of a word on a snapshot, into the 53 that a float64 has, as which groups
tell it each other."""


def location_of(environment: Mapping[str, str], host: str) -> int:
    """From the lowest bit: the host, the switch (or block) that it is on, and the one above that, each as a hash.

    On a cluster whose Slurm knows its topology, SLURM_TOPOLOGY_ADDR is the way to the task's node from the uppermost
    switch down, such as `s0.s4.s8.node1`, and SLURM_TOPOLOGY_ADDR_PATTERN says what each part is. Elsewhere only the
    host is known. Two of the same hash count as neighbours, which does no harm.
    """
    path = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if pattern[-1] != "node" or len(path) != len(pattern):  # none, or a name with dots in it
        path = [host]
    switches = path[:-1]
    above, switch = _hash(switches[:-1], SWITCH_BITS), _hash(switches, SWITCH_BITS)
    return (above << SWITCH_BITS | switch) << HOST_BITS | _hash(path, HOST_BITS)


def _hash(path: list[str], bits: int) -> int:
    """0 for nothing."""
    return zlib.crc32(".".join(path).encode()) % ((1 << bits) - 1) + 1 if path else 0
