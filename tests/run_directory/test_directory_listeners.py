"""Which ports a process listens on is read from the kernel."""

import os
import socket

from everstep.run.listeners import listeners


def test_listeners_are_told_with_their_addresses_and_guards():
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("0.0.0.0", 0)) as far:
        found = {one.port: one for one in listeners([("keeper", os.getpid()), ("worker", 2**22 + 1)])}
        local, public = found[near.getsockname()[1]], found[far.getsockname()[1]]
    assert (local.role, local.local, local.guard) == ("keeper", True, "the run's token")
    assert (public.address, public.local) == ("0.0.0.0", False)
