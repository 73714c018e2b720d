"""What a run takes from the machine it runs on: ports and devices."""

import random
import socket
from collections.abc import Sequence

from everstep.run.directory import LaunchError

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the ports of Linux's outgoing connections: the lighthouse must get its own back."""


def devices_of_groups(visible: Sequence[str], groups: int, ranks_per_group: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each group: devices of its own while they last, then shared from the first.

    None, as inherited, where there are no devices.
    """
    if not visible:
        return [None] * groups
    return [
        ",".join(visible[(group * ranks_per_group + rank) % len(visible)] for rank in range(ranks_per_group))
        for group in range(groups)
    ]


def free_port(host: str = HOST) -> int:
    """A TCP port of PORTS that nobody has now. Raises LaunchError when there is none."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port between {PORTS.start} and {PORTS.stop} on {host}.")


def listens(host: str, port: int) -> bool:
    """Whether a server accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=0.2).close()
    except OSError:
        return False
    return True
