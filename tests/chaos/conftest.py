"""Runs of the tiny trainer to be broken, and events of runs that never were."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import run_tiny
from everstep.chaos.view import View
from everstep.run.directory import holder_of
from watched import Watched, environment, until


@pytest.fixture
def victim():
    """A process to be stopped or killed."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


class TinyRun(Watched):
    """`run_tiny.py`: the real supervisor, agents and lighthouse, with workers that only look like trainers."""

    starts = subprocess.Popen  # a launcher is started again by the words of its command

    @staticmethod
    def command(config, run_dir, *args):
        return [sys.executable, run_tiny.__file__, str(run_dir), *args]

    def chaos(self, *args):
        """A running `everstep chaos` on this run."""
        return subprocess.Popen(
            [sys.executable, "-m", "everstep.cli", "chaos", str(self.run_dir), *args],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self):
        super().end()
        if holder := holder_of(self.run_dir):  # a launcher that was killed and started again
            os.kill(holder[0], signal.SIGTERM)
            until(lambda: holder_of(self.run_dir) is None, "the run to end")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts tiny runs that end with the module."""
    runs = []

    def _start(*args):
        run = TinyRun(None, tmp_path_factory.mktemp("tiny") / "run", *args)
        runs.append(run)
        return run

    yield _start
    for run in runs:
        run.end()


@pytest.fixture
def mount(tmp_path):
    """Mounts file systems of the test's own in memory: of a name below tmp_path and a size as mount(8) takes it."""
    with contextlib.ExitStack() as stack:

        def _mount(name, size):
            place = tmp_path / name
            place.mkdir()
            made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True)
            if made.returncode != 0:
                pytest.skip("mounting a file system needs root")
            stack.callback(subprocess.run, ["umount", place], check=True)
            return place

        yield _mount


class Told:
    """A view that is told of a run of `groups`, at one second a line."""

    def __init__(self, run_dir: Path, groups: int, spared=()):
        self.view, self.now = View(run_dir, spared), 0.0
        self.tell("run_started", groups=groups)

    def tell(self, kind, **fields):
        self.now += 1.0
        self.view.apply(
            [{"t": self.now, "mono": self.now, "group": None, "rank": None, "step": None, "kind": kind} | fields]
        )

    def take_part(self, *groups, step=1):
        """These groups are started and commit a step together."""
        for group in groups:
            self.tell("agent_up", group=group, pid=1)
            self.tell("workers_started", group=group, incarnation=0, pids=[2 + group])
        for group in groups:
            self.commit(group, groups, step)

    def commit(self, group, groups, step=1):
        names = {"history": f"{step:x}", "parent": f"{step - 1:x}"}
        self.tell("commit", group=group, rank=0, step=step, groups=list(groups), **names)


@pytest.fixture
def told(tmp_path):
    return lambda groups=3, **kwargs: Told(tmp_path, groups, **kwargs)
