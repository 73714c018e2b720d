"""Processes forked on request, from one that has everything imported and no thread of its own.

Forking is safe because whoever forks here initialises no CUDA and starts no thread (pyarrow's jemalloc has one of its
own and stops it around a fork). Requests and answers are JSON objects, one a packet of a SOCK_SEQPACKET socketpair:

    {"id", "run": "module:function", "args", "log", "env"}    call `run` with `args`, its output appended to `log`
    {"id", "pid"}                                             it was forked
    {"pid", "exitcode"}                                       it has ended; a fork point's children only
    {"reap": true}                                            nobody sends those a signal any more whose end was told

Two processes fork: the warm process detaches what it forks, whose parent becomes the supervisor (`fork_detached`); a
fork point keeps its children, and tells its agent how they ended (`ForkPoint`).
"""

import contextlib
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from everstep.run.lifeline import die_with_adopter, die_with_parent
from everstep.run.stops import STOPS

MAX_PACKET = 1 << 20


class _Output(io.FileIO):
    """A stream that loses what the system does not take."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def keep_on_without_output() -> None:
    """From now on what stdout or stderr do not take (a full disk, a pipe that nobody reads) is lost, and ends nobody.
    Those that were closed lead nowhere."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is not getattr(sys, f"__{name}__"):
            continue  # of somebody who put another in its place
        if before is not None:
            before.reconfigure(line_buffering=True)  # whoever has it goes on with it
        output = io.BufferedWriter(_Output(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(output, errors="backslashreplace", line_buffering=True))


def redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process to `path`, line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    keep_on_without_output()


def _resolve(name: str):
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def become(request: dict, parent_pid: int) -> None:
    """Turn this forked process into what was asked for, which dies with `parent_pid`; never returns."""
    status = 1
    try:
        die_with_adopter(parent_pid)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(request["env"])
        redirect_output(Path(request["log"]))
        status = _resolve(request["run"])(*request["args"]) or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  the last frame of a process: report whatever it was
        traceback.print_exc()
    finally:
        _end(status, sys.stdout, sys.stderr)


def _end(status: int, *streams: TextIO) -> None:
    """End this process here, whatever becomes of its last words: what is above in its stack is its maker's. Never
    returns."""
    try:
        for stream in streams:
            stream.flush()
    finally:
        os._exit(status)


def forked(run: Callable[[], None]) -> int:
    """Fork a process that calls `run` and ends: with status 0, or 1 and the traceback of what it raised; its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException:  # noqa: BLE001  the last frame of a process
            traceback.print_exc()
        finally:
            _end(status, sys.stderr)
    return pid


def fork_detached(request: dict, adopter_pid: int, channel: socket.socket) -> int:
    """Fork a grandchild that runs `request`, in a session of its own; returns its pid. The child in between ends at
    once, and `adopter_pid`, a subreaper above this process, becomes the parent."""
    pid_r, pid_w = os.pipe()

    def fork_again() -> None:
        os.close(pid_r)
        if pid := os.fork():
            os.write(pid_w, str(pid).encode())
            return
        os.close(pid_w)
        channel.close()
        os.setsid()  # a terminal's Ctrl-C is for the supervisor to handle
        become(request, adopter_pid)

    middle = forked(fork_again)
    os.close(pid_w)
    pid = int(os.read(pid_r, 32))
    os.close(pid_r)
    os.waitpid(middle, 0)
    return pid


class Forker:
    """The side that asks: sends requests, collects answers without blocking. `pid` is the process that forks."""

    gone = False
    """Whether the other side has closed: that process has ended."""

    def __init__(self, channel: socket.socket, pid: int):
        self.pid = pid
        self._channel = channel
        self._channel.setblocking(False)
        self._next_id = 0
        self._unsent: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._channel.fileno()

    def fork(self, run: str, args: Sequence, log: Path, env: Mapping[str, str] | None = None) -> int:
        """Ask for a process that calls `run` ("module:function") with `args` (JSON), with `env` besides ours; returns
        the request's id. Of one that has died nobody answers."""
        self._next_id += 1
        request = {"id": self._next_id, "run": run, "args": list(args), "log": str(log), "env": dict(env or {})}
        self._ask(request)
        return self._next_id

    def _ask(self, request: dict) -> None:
        self._unsent.append(json.dumps(request).encode())
        self._send()

    def _send(self) -> None:
        """As much as the channel takes. The rest goes with later calls: what it holds will be answered."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                self._channel.send(self._unsent[0])
                self._unsent.popleft()

    def answers(self) -> list[dict]:
        """What has arrived since the last call."""
        self._send()
        found = []
        while True:
            try:
                packet = self._channel.recv(MAX_PACKET)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                packet = b""
            if not packet:
                self.gone = True
                return found
            found.append(json.loads(packet))

    def close(self) -> None:
        self._channel.close()


class ForkPoint(Forker):
    """A copy of this process, from which it forks others that are to find everything imported.

    It dies with its maker, and its children die with it. Must be made from the main thread, before this process has
    others.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        maker = os.getpid()

        def serve() -> None:
            die_with_parent(maker)
            ours.close()
            os.closerange(0, 1)
            os.open(os.devnull, os.O_RDONLY)  # the lowest that is free: 0
            # A batch system signals every process of a job, a terminal every one in the foreground: a stop must reach
            # the children through their agent.
            for stop in STOPS:
                signal.signal(stop, signal.SIG_IGN)
            _serve_children(theirs)

        pid = forked(serve)
        theirs.close()
        super().__init__(ours, pid)

    def exitcode(self) -> int:
        """How it ended, negative for a signal; waits for it. To be asked once."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def reap(self) -> None:
        """Give the pids back of children that have ended: until then nobody else gets one, and a signal that comes too
        late reaches nobody."""
        self._ask({"reap": True})


def _serve_children(channel: socket.socket) -> None:
    """Fork a child for each request, and tell when and how each ended. Returns when the other side closes."""
    own_pid = os.getpid()
    children: dict[int, int] = {}  # pids by pidfd
    ended: list[int] = []  # told, and not reaped yet
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    while True:
        ready = {fd for fd, _ in waiting.poll()}
        for fd in children.keys() & ready:
            waiting.unregister(fd)
            os.close(fd)
            ended.append(children.pop(fd))
            end = os.waitid(os.P_PID, ended[-1], os.WEXITED | os.WNOWAIT)
            assert end is not None  # without WNOHANG
            exitcode = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            channel.send(json.dumps({"pid": ended[-1], "exitcode": exitcode}).encode())
        if channel.fileno() in ready:
            packet = channel.recv(MAX_PACKET)
            if not packet:
                return
            request = json.loads(packet)
            if "reap" in request:
                while ended:
                    os.waitpid(ended.pop(), 0)
                continue
            pid = os.fork()
            if pid == 0:
                channel.close()
                for fd in children:
                    os.close(fd)
                become(request, own_pid)
            fd = os.pidfd_open(pid)
            waiting.register(fd, select.POLLIN)
            children[fd] = pid
            channel.send(json.dumps({"id": request["id"], "pid": pid}).encode())
