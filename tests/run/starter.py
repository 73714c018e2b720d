"""A process that imports torch, torchtitan and Everstep once, and forks the processes that tests start: the other side
of `forked.py`.

    python starter.py FD

Requests come over the socket FD. {"argv", "env", "cwd", "session"}, with three descriptors for the standard streams, is
answered by {"pid"}. {"pid"} is answered by {"status"}, which is null while that process runs.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types

from everstep import cli
from everstep.commands import replay
from everstep.launch import forking, prepare
from everstep.run.stops import die_with_parent

LONGEST = 1 << 20


def forked(does, stdout, stderr):
    """Call `does` in a fork, and return the fork's exit status."""
    pid = os.fork()
    if pid == 0:
        for number, stream in ((1, stdout), (2, stderr)):
            os.dup2(stream.fileno(), number)
        leave(does)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def answered(command, **how):
    """Stand in for `subprocess.run` of the process that prepares a config for a command."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as besides:
        status = forked(lambda: prepare.main(json.loads(command[-1]), tells=True), said, besides)
        said.seek(0)
        besides.seek(0)
        return subprocess.CompletedProcess(command, status, said.read(), besides.read())


def trained(command, *, stdout, **how):
    """Stand in for `subprocess.run` of the run that computes a step again (`everstep replay`)."""
    return subprocess.CompletedProcess(command, forked(lambda: run(command[1:]), stdout, stdout))


def leave(does):
    """Call `does`, and end this process with the status that it returns."""
    status = 1
    try:
        sys.modules["__main__"] = types.ModuleType("__main__")  # else children would import this file as their main one
        status = does() or 0
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(argv):
    """Do what `python ARGV` does, and return its exit status."""
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            return importlib.import_module(argv[1]).main()
        if argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            exec(compile(argv[1], "<string>", "exec"), sys.modules["__main__"].__dict__)  # noqa: S102  what `python -c` does
            return 0
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001  the last frame of a process
        traceback.print_exc()
        return 1


def become(request, streams, channel):
    """Turn this fork into the requested process. Never returns."""

    def does():
        if request["session"]:
            os.setsid()
        channel.close()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.path[:0] = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
        tempfile.tempdir = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(request["argv"])

    leave(does)


def main():
    channel = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only pytest handles a terminal's Ctrl-C
    os.umask(0)  # what a run makes is for its owner alone even so
    forking.preload()
    for command in cli.COMMANDS.values():
        importlib.import_module(f"everstep.{command.place}")
    replay.subprocess = types.SimpleNamespace(run=trained, DEVNULL=subprocess.DEVNULL)
    prepare.subprocess = types.SimpleNamespace(run=answered, TimeoutExpired=subprocess.TimeoutExpired)
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not copy shared pages
    while True:
        packet, streams, _, _ = socket.recv_fds(channel, LONGEST, 3)
        if not packet:
            return
        request = json.loads(packet)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                become(request, streams, channel)
            for fd in streams:
                os.close(fd)
            answer = {"pid": pid}
        channel.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
