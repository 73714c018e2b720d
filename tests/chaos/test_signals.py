"""Signals reach what was announced, and what was stopped goes on, whatever is done to the injector."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from everstep.chaos import signals
from everstep.chaos.signals import Receivers
from watched import environment, until

INJECTOR = """
import subprocess, sys, time
from everstep.chaos.signals import Receivers
pid, lasts_s = int(sys.argv[1]), float(sys.argv[2])
print(Receivers([(pid, time.time())]).hold(lasts_s, subprocess.DEVNULL).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def injector(victim):
    """Stops the victim for a time, and then does nothing more."""
    started = []

    def _inject(lasts_s):
        command = [sys.executable, "-c", INJECTOR, str(victim.pid), str(lasts_s)]
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        process.holder = int(process.stdout.readline())
        until(lambda: is_stopped(victim), "the victim to stop")
        return process

    yield _inject
    for process in started:
        process.kill()
        process.wait()


def is_stopped(process):
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_a_fault_ends_when_its_time_is_up(victim, injector):
    injector(0.5)
    until(lambda: not is_stopped(victim), "the victim to go on")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_fault_ends_at_once_when_the_injector_dies_and_not_by_what_is_meant_for_it(victim, injector, signum):
    process = injector(600)
    for meant in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process.holder, meant)
    time.sleep(0.3)
    assert is_stopped(victim)
    os.killpg(process.pid, signum)
    until(lambda: not is_stopped(victim), "the victim to go on")
    until(lambda: not psutil.pid_exists(process.holder), "the process that did it to end")


def test_a_signal_reaches_no_process_that_began_after_it_was_announced(victim):
    born = psutil.Process(victim.pid).create_time()
    assert signals.send([(victim.pid, born - 2.0)], signal.SIGKILL) == []
    assert Receivers([(victim.pid, born - 2.0)]).hold(0.1, subprocess.DEVNULL).wait() == 0
    assert victim.poll() is None
    assert signals.send([(victim.pid, born)], signal.SIGKILL) == [victim.pid]
    assert victim.wait(10) == -signal.SIGKILL
    assert signals.send([(victim.pid, born)], signal.SIGKILL) == []
