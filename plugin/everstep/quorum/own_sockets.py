"""This process's TCP sockets, whoever opened them: torch's and torchft's give no access to theirs."""

import contextlib
import os
import socket
from collections.abc import Iterator


def own_sockets() -> Iterator[socket.socket]:
    """Each as a copy, which is closed again when the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or none of a socket
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield copy


def listens(sock: socket.socket) -> bool:
    """Whether it is one that listens."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
