"""Runs of the tiny trainer to be broken, and events of runs that never were."""

import os
import signal
import subprocess
import sys

import pytest

import run_tiny
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
