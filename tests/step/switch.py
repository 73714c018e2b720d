"""A network of a few hosts on this machine: one network namespace per host, each with a TUN device, and a process that
reads packets from these and writes them to the receiver's: a switch that can lose and delay packets from any host to
any other. Needs CAP_NET_ADMIN, /dev/net/tun and `ip`. A namespace ends with the processes that use it."""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 16384
PREFIX = "10.77.0."
LIBC = ctypes.CDLL(None, use_errno=True)


class NoNetworkError(RuntimeError):
    """This process may not create network namespaces on this machine. The message is one sentence that says why."""


@dataclass(frozen=True)
class Rule:
    """What happens to packets from one host to another: a fraction is `lost`, the others come `delay_s` late."""

    lost: float = 0.0
    delay_s: float = 0.0


Rules = dict[tuple[int, int], Rule]
"""(sender, receiver) → rule. Without a rule, packets pass at once."""


def address(host: int) -> str:
    """Return the IP address of host number `host`, from 0."""
    return f"{PREFIX}{host + 1}"


def enter(namespace: str) -> None:
    """Let this thread, and those that it starts, use the network of a namespace, given as a file in `/proc`."""
    with open(namespace) as file:
        _call("setns", file.fileno(), CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    if getattr(LIBC, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def run(hosts: int, connection: Connection) -> None:
    """Run a switch of `hosts` hosts. Send their namespaces or why there are none; answer each `Rules` with None."""
    try:
        made = [_host(number) for number in range(hosts)]
    except (OSError, subprocess.SubprocessError) as error:
        connection.send(f"no network namespaces with TUN devices can be made here: {error}")
        return
    connection.send([f"/proc/{os.getpid()}/fd/{namespace}" for namespace, _ in made])
    _forward([device for _, device in made], connection)


def _host(number: int) -> tuple[int, int]:
    """Create a namespace with its device; return file descriptors of both."""
    found: list[tuple[int, int] | Exception] = []

    def make() -> None:
        try:
            _call("unshare", CLONE_NEWNET)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", b"eth0", IFF_TUN | IFF_NO_PI))
            for words in ("link set lo up", f"addr add {address(number)}/24 dev eth0", f"link set eth0 mtu {MTU} up"):
                subprocess.run(["ip", *words.split()], check=True, capture_output=True)
            found.append((os.open("/proc/thread-self/ns/net", os.O_RDONLY), device))
        except (OSError, subprocess.SubprocessError) as error:
            found.append(error)

    thread = threading.Thread(target=make)  # only this thread moves to the new namespace, and it ends
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _forward(devices: list[int], connection: Connection) -> None:
    """Forward packets until the other end of the connection is closed."""
    rules: Rules = {}
    chance = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []
    numbers = {device: number for number, device in enumerate(devices)}
    count = 0
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in wait([*devices, connection], wait_s):
            if source is connection:
                try:
                    rules = connection.recv()
                except EOFError:
                    return
                connection.send(None)
                continue
            packet = os.read(source, MTU + 64)
            if packet[0] >> 4 != 4 or not 0 < packet[19] <= len(devices):
                continue
            receiver = packet[19] - 1
            rule = rules.get((numbers[source], receiver))
            if rule is not None and chance.random() < rule.lost:
                continue
            count += 1
            due = time.monotonic() + (rule.delay_s if rule is not None else 0.0)
            heapq.heappush(waiting, (due, count, receiver, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, receiver, packet = heapq.heappop(waiting)
            with contextlib.suppress(BlockingIOError):  # the device's queue is full: the packet is lost, as on a wire
                os.write(devices[receiver], packet)
