"""Faults end, whatever is done to the injector."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from everstep.chaos import signals
from everstep.chaos.guard import Guards, Held
from everstep.chaos.signals import Receivers
from everstep.run.events import read_events
from watched import environment, until

INJECTOR = """
import signal, sys, time
from pathlib import Path
from everstep.chaos.guard import Guards, Held
from everstep.chaos.signals import Receivers
run_dir, pid, lasts_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
guards, victim = Guards(run_dir), Receivers([(pid, time.time())])
guards.hold(Held("stop-worker", 1, lasts_s, [victim]))
assert victim.signal(signal.SIGSTOP) == [pid]
print(guards._processes[0].pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def injector(tmp_path, victim):
    """Stops the victim for a time, and then does nothing more."""
    started = []

    def _inject(lasts_s):
        command = [sys.executable, "-c", INJECTOR, str(tmp_path), str(victim.pid), str(lasts_s)]
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        process.guard_pid = int(process.stdout.readline())
        if lasts_s > 10:
            until(lambda: is_stopped(victim), "the victim to stop")
        return process

    yield _inject
    for process in started:
        process.kill()
        process.wait()


def is_stopped(process):
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def undone(run_dir):
    return [event["fault"] for event in read_events(run_dir, {"fault_undone"})]


def test_a_fault_ends_when_its_time_is_up(tmp_path, victim, injector):
    injector(0.5)
    until(lambda: undone(tmp_path) == ["stop-worker"], "the event that says so")
    until(lambda: not is_stopped(victim), "the victim to go on")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_fault_ends_at_once_when_the_injector_dies(tmp_path, victim, injector, signum):
    process = injector(600)
    os.killpg(process.pid, signum)
    until(lambda: not is_stopped(victim), "the victim to go on")
    until(lambda: not psutil.pid_exists(process.guard_pid), "the guard to end")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_guard_outlives_what_is_meant_for_the_injector(tmp_path, injector, victim, signum):
    process = injector(600)
    os.kill(process.guard_pid, signum)
    time.sleep(0.3)
    assert is_stopped(victim)
    assert psutil.pid_exists(process.guard_pid)
    assert undone(tmp_path) == []


def test_an_end_that_fails_is_said_and_keeps_no_other_from_being_done(tmp_path, victim, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no srun there
    guards = Guards(tmp_path)
    guards.hold(Held("broken", None, 600.0, [Receivers([(victim.pid, time.time())], job=1)]))
    guards.hold(Held("sound", None, 600.0, [Receivers([(victim.pid, time.time())])]))
    victim.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(victim), "the victim to stop")
    assert guards.holding
    guards.close()
    assert not guards.holding
    until(lambda: not is_stopped(victim), "the second end")
    (failed,) = read_events(tmp_path, {"fault_undo_failed"})
    assert (failed["fault"], "srun" in failed["reason"]) == ("broken", True)


def test_a_signal_reaches_no_process_that_began_after_it_was_announced(victim):
    born = psutil.Process(victim.pid).create_time()
    assert signals.send([(victim.pid, born - 2.0)], signal.SIGKILL) == []
    assert victim.poll() is None
    assert signals.send([(victim.pid, born)], signal.SIGKILL) == [victim.pid]
    assert victim.wait(10) == -signal.SIGKILL
    assert signals.send([(victim.pid, born)], signal.SIGKILL) == []
