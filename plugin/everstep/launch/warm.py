"""The warm process: imports torch, torchtitan and ours once, then forks agents and lighthouses on request.

A run on one machine pays the import once instead of once per group, and restarts of agents and of the
lighthouse are forks. Forking is safe because nothing here initialises CUDA or starts a thread (pyarrow's
jemalloc has one of its own and stops it around a fork). A forked process is detached from the warm process:
the supervisor, as subreaper, becomes its parent, so that nobody depends on the warm process staying alive.

The supervisor talks to it over a SOCK_SEQPACKET socketpair, one JSON object a packet.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from everstep.run.lifeline import die_with_adopter, die_with_parent

PRELOAD = (
    "torchft",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torchtitan.train",
    "everstep.train",
    "everstep.config_registry",
    "everstep.semi.worker_files",
    "everstep.titan.load",
    "everstep.titan.data.byte_tokenizer",
    "everstep.titan.data.stdlib_text",
    "everstep.titan.data.streams",
    "everstep.titan.data.tokens",
    "everstep.titan.semi_sync",
    "everstep.titan.trainer",
    "everstep.launch.elastic",
    "everstep.launch.worker",
    "everstep.quorum.lighthouse",
)
"""What an agent, its workers and a lighthouse use. All of it: what a worker imports by itself delays each restart,
and a restart must not meet a newer version of a file than its group began with."""

_MAX_PACKET = 1 << 20


def preload(modules: Sequence[str] = PRELOAD) -> None:
    """Import `modules` without touching CUDA. Raises the module's own error when one cannot be imported."""
    # Without it, asking whether CUDA is there would initialise it, and a forked worker could not use it any
    # more.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("RUST_LOG", "warn")  # torchft would fill the logs with every quorum, several times a step
    # Objects of thousands of modules, all of which stay: looking through them again and again is a quarter of the time.
    gc.disable()
    try:
        if any(module.startswith("torchtitan") for module in modules):
            from everstep.titan import cpu

            if not cpu.has_accelerator():
                cpu.stand_in()  # torchtitan asks for its device while it is imported
        for module in modules:
            importlib.import_module(module)
        if "everstep.titan.load" in modules:
            from everstep.titan.load import parse_any

            parse_any()
        gc.freeze()  # nor should a forked process look at them, and so copy their pages
    finally:
        gc.enable()


def redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process to `path`, line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _resolve(name: str):
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _become(request: dict, supervisor_pid: int) -> None:
    """Turn this forked process into what was asked for; never returns."""
    status = 1
    try:
        os.setsid()  # a terminal's Ctrl-C is for the supervisor to handle
        die_with_adopter(supervisor_pid)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        redirect_output(Path(request["log"]))
        status = _resolve(request["run"])(*request["args"]) or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  the last frame of a process: report whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _fork_detached(request: dict, supervisor_pid: int, channel: socket.socket) -> int:
    """Fork a grandchild that runs `request`; returns its pid. The child in between ends at once."""
    pid_r, pid_w = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(pid_r)
        pid = os.fork()
        if pid:
            os.write(pid_w, str(pid).encode())
            os._exit(0)
        os.close(pid_w)
        channel.close()
        _become(request, supervisor_pid)
    os.close(pid_w)
    pid = int(os.read(pid_r, 32))
    os.close(pid_r)
    os.waitpid(middle, 0)
    return pid


def serve(channel: socket.socket, supervisor_pid: int, modules: Sequence[str]) -> None:
    """Import `modules`, then answer requests {"id", "run": "module:function", "args", "log"} with {"id",
    "pid"}.

    Sends {"ready": true} after the imports, or {"fatal": sentence} and returns when one fails. Returns when
    the other side closes.
    """
    try:
        preload(modules)
    except Exception as error:  # noqa: BLE001  whatever a package does while it is imported
        traceback.print_exc()
        channel.send(json.dumps({"fatal": f"{type(error).__name__}: {error}"}).encode())
        return
    channel.send(json.dumps({"ready": True}).encode())
    while packet := channel.recv(_MAX_PACKET):
        request = json.loads(packet)
        pid = _fork_detached(request, supervisor_pid, channel)
        channel.send(json.dumps({"id": request["id"], "pid": pid}).encode())


class WarmProcess:
    """The supervisor's side: starts the warm process, sends requests, collects answers without blocking.

    Requests may be sent at once; they are answered when the imports are done. `pid` dies with this process.
    """

    def __init__(self, modules: Sequence[str], log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        command = [
            sys.executable,
            "-m",
            "everstep.launch.warm",
            str(theirs.fileno()),
            str(os.getpid()),
            *modules,
        ]
        append = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self.pid = os.posix_spawn(
            sys.executable,
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        theirs.close()
        self._channel.setblocking(False)
        self._next_id = 0

    def fileno(self) -> int:
        return self._channel.fileno()

    def fork(self, run: str, args: Sequence, log: Path) -> int:
        """Ask for a process that calls `run` ("module:function") with `args` (JSON); returns the request's
        id.
        """
        self._next_id += 1
        request = {"id": self._next_id, "run": run, "args": list(args), "log": str(log)}
        self._channel.send(json.dumps(request).encode())
        return self._next_id

    def answers(self) -> list[dict]:
        """What has arrived since the last call."""
        found = []
        while True:
            try:
                packet = self._channel.recv(_MAX_PACKET)
            except (BlockingIOError, ConnectionResetError):
                return found
            if not packet:
                return found
            found.append(json.loads(packet))

    def close(self) -> None:
        self._channel.close()


def main() -> None:
    fd, supervisor_pid, *modules = sys.argv[1:]
    die_with_parent(int(supervisor_pid))
    serve(socket.socket(fileno=int(fd)), int(supervisor_pid), modules)


if __name__ == "__main__":
    main()
