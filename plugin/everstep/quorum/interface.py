"""Which network interface a run's processes use: the one that has the address of `fault_tolerance.bind_host`.

What Everstep opens itself listens on that address. Gloo and NCCL would choose by themselves: Gloo where the host's name
points, which on Debian is 127.0.1.1, and NCCL the first interface that is up. They are told by the environment.
"""

import os
import socket
from dataclasses import dataclass

import psutil

ELSEWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): the interface that leads to it is that of the default route."""


class InterfaceError(ValueError):
    """An address that none of this machine's interfaces has; in one sentence, with what to do."""


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine.

    Attributes:
        name: as the kernel has it, such as eth0.
        address: the one that is listened on.
    """

    name: str
    address: str


def interface_of(host: str) -> Interface:
    """The interface that has `host`, a name or address; for "" or a host name that points to loopback only, the one of
    the default route. Raises InterfaceError."""
    own = host in ("", socket.gethostname())
    try:
        address = str(socket.getaddrinfo(host or socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        if not own:
            raise InterfaceError(f"fault_tolerance.bind_host = '{host}' is no address: {error}") from error
        address = "127.0.0.1"
    if own and address.startswith("127."):
        address = _default_route() or address
    for name, addresses in psutil.net_if_addrs().items():
        if address in {found.address.partition("%")[0] for found in addresses}:
            return Interface(name, address)
    if address.startswith("127."):  # any of these is, without being listed
        return Interface("lo", address)
    raise InterfaceError(
        f"fault_tolerance.bind_host = '{host}' is {address}, which no interface of {socket.gethostname()} has"
    )


def use_interface(host: str) -> Interface:
    """Have Gloo and NCCL use the interface of `host` in this process and those that it starts; unless the environment
    names one already. Before either of them is used. Raises InterfaceError."""
    found = interface_of(host)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", found.name)
    # "=" takes the name as it is and not as a prefix.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={found.name}")
    return found


def _default_route() -> str:
    """This machine's address towards others; "" if there is no way to any. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
