"""The warm process: imports torch, torchtitan and ours once, then forks agents and lighthouses on request.

A run on one machine pays the import once instead of once per group, and restarts of agents and of the
lighthouse are forks (`everstep.launch.forking`). A forked process is detached from the warm process:
the supervisor, as subreaper, becomes its parent, so that nobody depends on the warm process staying alive.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from everstep.launch.forking import MAX_PACKET, Forker, fork_detached
from everstep.launch.memory import oom_kills
from everstep.launch.watchdog import Death
from everstep.run.lifeline import die_with_parent

SILENCE_S = 30.0
"""For a fork."""

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
    "everstep.launch.group_agent",
    "everstep.launch.worker",
    "everstep.quorum.lighthouse",
)
"""What an agent, its workers and a lighthouse use. All of it: what a worker imports by itself delays each restart,
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


def serve(channel: socket.socket, supervisor_pid: int, modules: Sequence[str]) -> None:
    """Import `modules`, then fork what is asked for, detached. Returns when the other side closes.

    Sends {"ready": true} after the imports, or {"fatal": sentence} and returns when one fails.
    """
    try:
        preload(modules)
    except Exception as error:  # noqa: BLE001  whatever a package does while it is imported
        traceback.print_exc()
        channel.send(json.dumps({"fatal": f"{type(error).__name__}: {error}"}).encode())
        return
    channel.send(json.dumps({"ready": True}).encode())
    while packet := channel.recv(MAX_PACKET):
        request = json.loads(packet)
        pid = fork_detached(request, supervisor_pid, channel)
        channel.send(json.dumps({"id": request["id"], "pid": pid}).encode())


class WarmProcess(Forker):
    """The supervisor's side. Requests may be sent at once; they are answered when the imports are done. `pid` dies with
    this process.
    """

    def __init__(self, modules: Sequence[str], log: Path):
        self._oom_kills = oom_kills()
        super().__init__(*self._start(modules, log))
        self.ready = False
        self.fatal = ""
        """What it could not import."""
        self.asked: dict[int, str] = {}
        """By request, the name of what it has not forked yet."""
        self._heard_mono = 0.0
        """When it last answered, or was asked while nobody waited for an answer."""

    def ask(self, name: str, run: str, args: Sequence, log: Path) -> None:
        """Have it fork what the caller calls `name`, once. Who that became, `forked` says."""
        if name not in self.asked.values():
            if not self.asked:
                self._heard_mono = time.monotonic()
            self.asked[self.fork(run, args, log)] = name

    def forked(self) -> list[tuple[str, int]]:
        """Names and pids of what it has forked since the last call."""
        found = []
        for answer in self.answers():
            self._heard_mono = time.monotonic()
            self.ready = self.ready or "ready" in answer
            self.fatal = answer.get("fatal", self.fatal)
            if "id" in answer:
                found.append((self.asked.pop(answer["id"]), answer["pid"]))
        return found

    def hangs(self, startup_timeout_s: float) -> bool:
        """Whether it owes an answer for too long."""
        patience_s = SILENCE_S if self.ready else startup_timeout_s
        return bool(self.asked) and time.monotonic() - self._heard_mono > patience_s

    def crashed(self, exitcode: int) -> bool:
        """Whether it ended of its own doing."""
        oom = exitcode == -signal.SIGKILL and oom_kills() > self._oom_kills
        return Death(time.monotonic(), exitcode, committed=False, out_of_memory=oom).crashed

    def _start(self, modules: Sequence[str], log: Path) -> tuple[socket.socket, int]:
        """Our end of its channel, and its pid."""
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        theirs.close()
        return ours, pid


def main() -> None:
    fd, supervisor_pid, *modules = sys.argv[1:]
    die_with_parent(int(supervisor_pid))
    serve(socket.socket(fileno=int(fd)), int(supervisor_pid), modules)


if __name__ == "__main__":
    main()
