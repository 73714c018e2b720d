"""Selects the network interface of a run's processes: the one with the address of `fault_tolerance.bind_host`.

Everstep's own servers listen on that address. Gloo and NCCL would choose by themselves: Gloo the address of the host's
name, which on Debian is 127.0.1.1, and NCCL the first interface that is up. Environment variables tell them instead.
"""

import os
import socket
from typing import NamedTuple

import psutil

ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737), so packets to it take the default route."""


class InterfaceError(ValueError):
    """No interface of this machine has the address. The message is one sentence that says what to do."""


class Interface(NamedTuple):
    """A network interface of this machine: the kernel's `name` of it, such as eth0, and the `address` to listen on."""

    name: str
    address: str


def interface_of(host: str) -> Interface:
    """Return the interface with the address of `host`, a name or address; "" stands for this machine's own name. If
    that name resolves to loopback only, return the interface of the default route. Raises InterfaceError."""
    own = host in ("", socket.gethostname())
    try:
        address = str(socket.getaddrinfo(host or socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        if not own:
            raise InterfaceError(f"{_must_be_here(host)}: {error}") from error
        address = "127.0.0.1"
    if own and address.startswith("127."):
        address = _default_route() or address
    for name, addresses in psutil.net_if_addrs().items():
        if address in {found.address.partition("%")[0] for found in addresses}:
            return Interface(name, address)
    if address.startswith("127."):  # the loopback interface has all of these, though psutil lists one
        return Interface("lo", address)
    raise InterfaceError(f"{_must_be_here(host)}: no interface of {socket.gethostname()} has {address}")


def use_interface(host: str) -> Interface:
    """Let Gloo and NCCL use the interface of `host` in this process and in those that it starts, unless the environment
    names one already. To be called before either of them is used. Raises InterfaceError."""
    found = interface_of(host)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", found.name)
    # With "=" NCCL takes the exact name, without it a prefix.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={found.name}")
    return found


def _must_be_here(host: str) -> str:
    return f"fault_tolerance.bind_host = '{host}' must be an address of this machine"


def _default_route() -> str:
    """Return this machine's address on the default route; "" if there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
