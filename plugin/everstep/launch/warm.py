"""The warm process: imports torch, torchtitan and ours once, then forks workers and lighthouses on request.

A launcher pays the import once, and restarts are forks (`everstep.launch.forking`). A forked process is detached from
the warm process: the launcher, as subreaper, becomes its parent, so nobody depends on the warm process staying alive.
When the launcher dies the kernel kills its workers, and the warm process what those had started themselves.

Requests and answers are JSON objects, one a packet of a SOCK_SEQPACKET socketpair:

    {"id", "run": "module:function", "args", "log", "env"}    call `run` with `args`, its output appended to `log`; a
                                                              descriptor that comes along is its first argument
    {"id", "pid"} or {"id", "errno"}                          it was forked, or could not be
    {"ready": true} or {"fatal": sentence}                    after the imports
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from everstep.launch import offspring
from everstep.launch.forking import fork_detached
from everstep.launch.watchdog import Death, oom_kills
from everstep.run.lifeline import wake_at_parents_death

SILENCE_S = 30.0
"""For a fork."""
MAX_PACKET = 1 << 20

PRELOAD = (
    "torchft",
    "torch.distributed.elastic.multiprocessing.errors",
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
    "everstep.launch.worker",
    "everstep.quorum.lighthouse",
)
"""What workers, their stores and a lighthouse use. All of it: what a worker imports by itself delays each restart,
and a restart must not meet a newer version of a file than its group began with."""


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


def serve(channel: socket.socket, launcher_pid: int, modules: Sequence[str]) -> None:
    """Import `modules`, then fork what is asked for, detached. When the other side closes, the launcher has ended: kill
    what its workers left, and return."""
    mark = f"{offspring.RUN_MARK}={os.environ.get(offspring.RUN_MARK)}"
    try:
        preload(modules)
    except Exception as error:  # noqa: BLE001  whatever a package does while it is imported
        traceback.print_exc()
        channel.send(json.dumps({"fatal": f"{type(error).__name__}: {error}"}).encode())
        return
    with contextlib.suppress(ConnectionError):
        channel.send(json.dumps({"ready": True}).encode())
        while True:
            packet, fds, _, _ = socket.recv_fds(channel, MAX_PACKET, 1)
            if not packet:
                break
            request = json.loads(packet)
            request["args"] = [*fds, *request["args"]]
            try:
                pid = fork_detached(request, launcher_pid, channel.close)
                answer = {"id": request["id"], "pid": pid}
            except OSError as error:
                answer = {"id": request["id"], "errno": error.errno}
            finally:
                for fd in fds:
                    os.close(fd)
            channel.send(json.dumps(answer).encode())
    offspring.kill_all(mark)


@dataclass(frozen=True)
class Request:
    """A process to be forked: it calls `run` ("module:function") with `args` (JSON), and has `env` besides ours."""

    run: str
    args: Sequence
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


class WarmProcess:
    """The launcher's side. Requests may be sent at once; they are answered when the imports are done.

    Raises OSError if it cannot be started.
    """

    def __init__(self, modules: Sequence[str], log: Path):
        self.ready = False
        self.fatal = ""
        """What it could not import."""
        self.owed: set[int] = set()
        """Requests that it has not answered."""
        self._oom_kills = oom_kills()
        self._heard_mono = 0.0
        """When it last answered, or was asked while it owed nothing."""
        self._next_id = 0
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._channel, self.pid = self._start(modules, log)
        self._channel.setblocking(False)

    def fileno(self) -> int:
        return self._channel.fileno()

    def fork(self, request: Request, fd: int = -1) -> int:
        """Ask for a process, whose first argument is `fd` if there is one, and which is closed here; the request's id.
        Of one that has died nobody answers."""
        self._next_id += 1
        if not self.owed:
            self._heard_mono = time.monotonic()
        self.owed.add(self._next_id)
        order = asdict(request) | {"id": self._next_id, "log": str(request.log)}
        self._unsent.append((json.dumps(order).encode(), fd))
        self._send()
        return self._next_id

    def answers(self) -> list[dict]:
        """What has arrived since the last call, without waiting."""
        self._send()
        found = []
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := self._channel.recv(MAX_PACKET):
                found.append(json.loads(packet))
        for answer in found:
            self._heard_mono = time.monotonic()
            self.ready = self.ready or "ready" in answer
            self.fatal = answer.get("fatal", self.fatal)
            self.owed.discard(answer.get("id"))
        return found

    def hangs(self, startup_timeout_s: float) -> bool:
        """Whether it owes an answer for too long."""
        patience_s = SILENCE_S if self.ready else startup_timeout_s
        return bool(self.owed) and time.monotonic() - self._heard_mono > patience_s

    def crashed(self, exitcode: int) -> bool:
        """Whether it ended of its own doing."""
        oom = exitcode == -signal.SIGKILL and oom_kills() > self._oom_kills
        return Death(time.monotonic(), exitcode, committed=False, out_of_memory=oom).crashed

    def close(self) -> None:
        while self._unsent:
            self._close_sent(self._unsent.popleft()[1])
        self._channel.close()

    def _send(self) -> None:
        """As much as the channel takes. The rest goes with later calls: what it holds will be answered."""
        with contextlib.suppress(OSError):  # one that has died is reaped, whatever else is short is tried again
            while self._unsent:
                packet, fd = self._unsent[0]
                socket.send_fds(self._channel, [packet], [fd] if fd >= 0 else [])
                self._unsent.popleft()
                self._close_sent(fd)

    def _close_sent(self, fd: int) -> None:
        if fd >= 0:
            os.close(fd)

    def _start(self, modules: Sequence[str], log: Path) -> tuple[socket.socket, int]:
        """Our end of its channel, and its pid."""
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        command = [sys.executable, "-m", "everstep.launch.warm", str(theirs.fileno()), str(os.getpid()), *modules]
        append = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        try:
            pid = os.posix_spawn(
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
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours, pid


def main() -> None:
    fd, launcher_pid, *modules = sys.argv[1:]
    wake_at_parents_death(int(launcher_pid))
    serve(socket.socket(fileno=int(fd)), int(launcher_pid), modules)


if __name__ == "__main__":
    main()
