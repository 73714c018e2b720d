"""Private names of TorchElastic, torch and multiprocessing that this room relies on, each with what it is for.

Nothing here imports torch: the command line and an agent that has not begun do without.
tests/launch/test_launch_private.py says which of the names a release has taken away.
"""

import inspect
import os
import sys
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from everstep.foreign import replace

# TorchElastic. Methods of its agent that ours stands in for are marked with `foreign.overrides`: `_start_workers`,
# `_stop_workers` and `_monitor_workers`, which it calls to start, stop and poll a group's workers, and `_exit_barrier`.


def processes(agent: Any) -> list[BaseProcess]:
    """A LocalElasticAgent's workers as processes; none before they are started and after they were stopped."""
    started = agent._pcontext._pc if agent._pcontext is not None else None
    return list(started.processes) if started is not None else []


def set_restarts_left(agent: Any, number: int) -> None:
    """How often a LocalElasticAgent would still start its workers; what it counts restarts by."""
    replace(agent, "_remaining_restarts", number)


# torch's Flight Recorder


def flight_records(backend: str) -> tuple[bytes, bytes]:
    """What this process's Flight Recorder of a backend holds: as JSON, and as torch's own dump with stacks. Empty
    where torch has not been imported. Raises RuntimeError where there is no such recorder."""
    recorder: Any = sys.modules.get("torch._C._distributed_c10d")
    if recorder is None:
        return b"", b""
    return recorder._dump_fr_trace_json(backend=backend), recorder._dump_fr_trace(backend=backend)


# multiprocessing's fork server


def fork_server_options() -> tuple[dict[str, Any], bytes | None]:
    """What `forkserver.main` takes beside its three arguments, and the key that its callers show. Python 3.14
    authenticates them."""
    if "authkey_r" not in inspect.signature(forkserver.main).parameters:
        return {}, None
    module: Any = forkserver
    key_r, key_w = os.pipe()
    key = os.urandom(module._AUTHKEY_LEN)
    os.write(key_w, key)
    os.close(key_w)
    return {"authkey_r": key_r}, key


def fork_from(address: str, alive_fd: int, pid: int, key: bytes | None) -> None:
    """Have this process's "forkserver" processes come from the server of that address and pid."""
    module: Any = forkserver
    server = module._forkserver
    if key is not None:
        replace(server, "_forkserver_authkey", key)
    replace(server, "_forkserver_address", address)
    replace(server, "_forkserver_alive_fd", alive_fd)
    replace(server, "_forkserver_pid", pid)
