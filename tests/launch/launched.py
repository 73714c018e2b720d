"""Real runs of the tiny trainer. Tests watch them through their events and processes."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import termios
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from everstep.config.sections import FaultTolerance
from everstep.launch.settings import GroupSettings
from everstep.run.address import publish_address
from everstep.run.directory import config_file, prepared_file
from everstep.run.files import write_json
from forked import Forked
from watched import Followed, environment, until

HERE = Path(__file__).parent
DEADLINE_S = 120.0
FULL = Path("/dev/full")

on_a_full_disk = pytest.mark.skipif(not FULL.exists(), reason="there is no full disk here")


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def short_folder():
    """Return a temporary folder with a path short enough for names of sockets; pytest's are longer than a user's."""
    return Path(tempfile.mkdtemp(prefix="tiny-", dir="/tmp"))


class Tiny(Followed):
    """A started process. Subclasses set `process`, `output` and `temporary`."""

    def end(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)
        shutil.rmtree(self.temporary, ignore_errors=True)


class TinyAgent(Tiny):
    """One agent of two ranks, in a new session, as a batch job starts it."""

    CODE = """
import json, signal, sys
from pathlib import Path
from everstep.config.sections import FaultTolerance
from everstep.launch import agent, children, group, orphans, worker
from everstep.launch.settings import GroupSettings
told = json.loads(sys.argv[1])
group.STOP_GRACE_S = told.pop("stop_grace_s", 120.0)
if told.pop("unkillable", False):
    to_child, orphans.kill = children.Child.signal, lambda processes: None
    children.Child.signal = lambda child, signum: signum == signal.SIGKILL or to_child(child, signum)
    group.CLEANUP_TIMEOUT_S = children.KILL_GRACE_S = 1.0
section = FaultTolerance(**told.pop("fault_tolerance"))
settings = GroupSettings(run_dir=Path(told.pop("run_dir")), fault_tolerance=section, **told)
worker.ENTRY, agent.PRELOAD = "tiny_trainer:main", ("tiny_trainer", "torch.distributed")
sys.exit(agent.run_agent(settings))
"""

    def __init__(self, folder, *flags, **settings):
        super().__init__(folder / "run")
        self.temporary = short_folder()
        self.output = settings.pop("output", None) or folder / f"agent-{os.urandom(4).hex()}.out"
        more = settings.pop("environment", {})
        if settings.pop("published", True):
            publish_address(self.run_dir, "http://127.0.0.1:1")
        section = {f.name for f in fields(FaultTolerance)} - {f.name for f in fields(GroupSettings)}
        config_file(self.run_dir).parent.mkdir(exist_ok=True)
        groups = settings.pop("groups", 1)
        write_json(prepared_file(self.run_dir), {"groups": groups})
        flags = ["--fault_tolerance.groups", str(groups), *flags]
        config_file(self.run_dir).write_text(f"flags = {json.dumps(flags)}")
        arguments = {
            "run_dir": str(self.run_dir), "group": 0, "ranks": 2,
            "fault_tolerance": {"enable": True} | {name: settings.pop(name) for name in section & settings.keys()},
            **settings,
        }  # fmt: skip
        with self.output.open("ab") as output:
            self.process = Forked(
                [sys.executable, "-c", self.CODE, json.dumps(arguments)], stdout=output, stderr=subprocess.STDOUT,
                env=environment(TMPDIR=str(self.temporary)) | more, start_new_session=True,
            )  # fmt: skip

    def until(self, condition, what):
        """Wait for a condition, even if this agent has ended: another agent of the group may go on."""
        return until(condition, what)


class TinyRun(Tiny):
    def __init__(self, run_dir, groups, ranks, *flags, terminal=None, temporary=None, forked=True):
        super().__init__(run_dir)
        self.output = run_dir.with_suffix(".out")
        self.temporary = temporary or short_folder()
        command = [sys.executable, str(HERE / "run_tiny.py"), str(run_dir), str(groups), str(ranks), *flags]
        # In a new session. With a terminal of its own, Ctrl-C there reaches only this run.
        options = {"env": environment(TMPDIR=str(self.temporary)), "start_new_session": True}
        if terminal is None:
            with self.output.open("ab") as output:
                starts = Forked if forked else subprocess.Popen
                self.process = starts(command, stdout=output, stderr=subprocess.STDOUT, **options)
        else:
            options |= dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
            self.process = subprocess.Popen(command, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), **options)
