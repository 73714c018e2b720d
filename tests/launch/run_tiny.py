"""Runs the supervisor on the tiny trainer: `python run_tiny.py RUN_DIR GROUPS RANKS [flags]`."""

import errno
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from everstep.launch import group, launcher, lighthouse, prepare, supervisor, view, worker
from everstep.launch.prepare import PrepareOptions
from everstep.run.directory import LaunchError

BURST_S, PAUSE_S = 0.4, 0.8
FAULTS = (errno.ENOSPC, errno.EAGAIN, errno.EMFILE, errno.ENOMEM)
FAIL = (
    "open", "os.fork", "os.posix_spawn", "os.rename", "os.mkdir", "os.link", "os.listdir", "os.scandir", "socket.bind",
)  # fmt: skip
MAIN = threading.main_thread()


def run_short_of_everything(run_dir, faults):
    """Have calls of this process (FAIL) raise OSError in bursts, until `faults` were made; then write their times."""
    begun, made, launcher = time.monotonic(), list[tuple[float, str]](), os.getpid()
    chance, over = random.Random(0), []

    def fail(event, args):
        if event not in FAIL or over or os.getpid() != launcher or threading.current_thread() is not MAIN:
            return
        if not (run_dir / "events" / "group-0.rank-0.jsonl").exists():
            return
        if (time.monotonic() - begun) % (BURST_S + PAUSE_S) > BURST_S or isinstance(args[0] if args else None, int):
            return
        made.append((time.time(), event))
        if len(made) >= faults:
            over.append(True)
            (run_dir / "scarce-faults").write_text(json.dumps(made))
        code = chance.choice(FAULTS)
        raise OSError(code, os.strerror(code))

    sys.addaudithook(fail)


def fail_as_told(file):
    """The run directory's disk fails with the error whose number this file holds, while there is such a file."""

    def check_room(run_dir, writes=True):
        if file.exists():
            raise OSError(int(file.read_text()), "no room")

    launcher.check_room = group.check_room = check_room
    os.pwrite = lambda *args, write=os.pwrite: check_room(args) or write(*args)  # nobody can beat


def main():
    run_dir, groups, ranks, *flags = sys.argv[1:]
    if "--tiny.nohup" in flags:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if "--tiny.scarce" in flags:
        run_short_of_everything(Path(run_dir), int(flags[flags.index("--tiny.scarce") + 1]))
    if "--tiny.full" in flags:
        fail_as_told(Path(run_dir).with_suffix(".full"))
    lighthouse.SILENCE_S, worker.EXIT_TIMEOUT_S = 4.0, 2.0
    config = Path(run_dir).with_suffix(".toml")
    config.write_text("")
    worker.ENTRY = "tiny_trainer:main"
    supervisor.PRELOAD = ("tiny_trainer", "torchft", "everstep.quorum.lighthouse")
    prepare.main = lambda order: __import__("tiny_trainer").prepare(order)
    options = PrepareOptions(str(config), flags, int(groups), int(ranks), run_dir)
    try:
        sys.exit(supervisor.run(options, view.RunState().show, page="--tiny.page" in flags))
    except LaunchError as error:
        print(f"everstep: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
