"""The TCPStore of one incarnation of a group: a process of its own, which ends with the incarnation."""

import os
import signal
from datetime import timedelta

from torch.distributed import TCPStore

TIMEOUT = timedelta(seconds=60)


def main(listener: int, host: str, port: int) -> None:
    """Serve a store on the descriptor `listener`, which listens on `host` and `port` already, until killed."""
    store = serve(listener, host, port)
    while os.getppid() > 0:
        signal.pause()
    del store


def serve(listener: int, host: str, port: int) -> TCPStore:
    """A store on the descriptor `listener`, for as long as the object lives. By itself it would listen on every
    interface."""
    options = {"is_master": True, "timeout": TIMEOUT, "wait_for_workers": False}
    return TCPStore(host, port, master_listen_fd=listener, **options)
