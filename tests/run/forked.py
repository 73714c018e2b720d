"""Python processes that need no imports: forks of a process that has imported torch, torchtitan and Everstep.

A test that starts `python -m everstep.cli run` would wait twice for seconds of imports. `Forked` is used like
`subprocess.Popen`, `ran` like `subprocess.run`. Tests of how processes are started use those of subprocess.
"""

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_ASKING = threading.Lock()


@functools.cache
def _starter():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("starter.py")), str(theirs.fileno())],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return ours


def _ask(request, streams=()):
    with _ASKING:
        channel = _starter()
        socket.send_fds(channel, [json.dumps(request).encode()], streams)
        answer = channel.recv(1 << 16)
    if not answer:
        raise RuntimeError("the starter of forked processes has ended")
    return json.loads(answer)


class Forked:
    """Like `subprocess.Popen(argv, …)` of a Python. Streams are files or descriptors; `stdout` may be PIPE."""

    def __init__(
        self, argv, *, stdin=subprocess.DEVNULL, stdout=None, stderr=None, env=None, cwd=None, start_new_session=False
    ):
        self.args, self.returncode, self.stdout = argv, None, None
        opened = []

        def descriptor(stream, number):
            if stream is None:
                return number
            if stream == subprocess.DEVNULL:
                opened.append(os.open(os.devnull, os.O_RDWR))
                return opened[-1]
            if stream == subprocess.PIPE:
                ours, theirs = os.pipe()
                opened.append(theirs)
                self.stdout = os.fdopen(ours)
                return theirs
            return stream if isinstance(stream, int) else stream.fileno()

        try:
            streams = [descriptor(stdin, 0), descriptor(stdout, 1)]
            streams.append(streams[1] if stderr == subprocess.STDOUT else descriptor(stderr, 2))
            environment = dict(os.environ if env is None else env)
            request = {"argv": list(map(str, argv[1:])), "env": environment, "cwd": str(cwd or os.getcwd())}
            self.pid = _ask(request | {"session": start_new_session}, streams)["pid"]
        finally:
            for fd in opened:
                os.close(fd)

    def poll(self):
        if self.returncode is None:
            self.returncode = _ask({"pid": self.pid})["status"]
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            ended = select.poll()
            fd = os.pidfd_open(self.pid)
            try:
                ended.register(fd, select.POLLIN)
                if not ended.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(fd)
        return self.poll()

    def send_signal(self, signum):
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def ran(argv, *, timeout=120.0, **options):
    """Like `subprocess.run(argv, capture_output=True, text=True, check=False, …)` of a Python."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Forked(argv, stdout=out, stderr=err, **options)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(argv, process.returncode, out.read(), err.read())
