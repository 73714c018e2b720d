"""Which ports the processes of a run listen on, on this machine, and what guards each."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

GUARDS = {
    "lighthouse": "the run's token, in ids of replicas; torchft's own port behind it is shut by a kernel filter",
    "worker": "states, watch: the run's token; TCPStore and Gloo: nothing, keep them inside the network",
    "agent": "TCPStore of the group's ranks: nothing, keep it inside the network",
    "keeper": "the run's token",
    "launcher": "Prometheus (fault_tolerance.metrics_port), if set: nothing, read only",
}
"""By the role of a process, what it listens for and what guards that. docs/security.md has it by service."""


@dataclass(frozen=True, order=True)
class Listener:
    """A TCP port that a process of the run listens on."""

    role: str
    pid: int
    address: str
    port: int

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback

    @property
    def guard(self) -> str:
        return GUARDS.get(self.role, "not known")


def listeners(processes: Iterable[tuple[str, int]]) -> list[Listener]:
    """All listeners of processes, given as (role, pid), in order; none for a process that has ended or is not ours."""
    found = set()
    for role, pid in processes:
        try:
            places = psutil.Process(pid).net_connections("tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found |= {Listener(role, pid, *place.laddr) for place in places if place.status == psutil.CONN_LISTEN}
    return sorted(found)
