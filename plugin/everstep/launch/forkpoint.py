"""A fork server of one's own: workers forked from a copy of this process, with everything it has imported.

multiprocessing's forkserver starts a fresh interpreter and imports again, and a process that itself came
from a forkserver shares that one instead of having its own. An agent needs neither: it forks a copy of
itself while it has no threads yet, the copy runs multiprocessing's own server loop, and from then on
"forkserver" workers of this process come from there. The copy dies with its maker, so that its workers can
die with it.
"""

import os
import signal
import socket
from multiprocessing import forkserver
from pathlib import Path

from everstep.launch import private
from everstep.run.lifeline import die_with_parent


def start_fork_point(socket_dir: Path) -> int:
    """Fork the copy and point this process's multiprocessing "forkserver" at it; returns its pid.

    Must be called once, from the main thread, before this process has other threads. `socket_dir` must be
    private to the user: who can connect there can start processes.
    """
    maker = os.getpid()
    address = str(socket_dir / f"fork-{maker}.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    os.chmod(address, 0o600)
    listener.listen()
    alive_r, alive_w = os.pipe()
    options, key = private.fork_server_options()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with_parent(maker)
            os.close(alive_w)
            # A batch system signals every process of a job: a stop must reach the workers through their
            # agent.
            for stop in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(stop, signal.SIG_IGN)
            forkserver.main(listener.fileno(), alive_r, [], **options)
            status = 0
        finally:
            os._exit(status)
    listener.close()
    os.close(alive_r)
    private.fork_from(address, alive_w, pid, key)
    return pid
