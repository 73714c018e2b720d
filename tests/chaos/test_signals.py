"""What an injector may hit, and that what it stopped goes on whatever is done to it."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from everstep.chaos import signals
from everstep.chaos.kinds import own_segments
from everstep.chaos.signals import Receivers
from everstep.chaos.view import View
from everstep.run.token import run_token
from everstep.snapshot.peers import Place
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from watched import DEADLINE_S, environment, until

INJECTOR = """
import subprocess, sys, time
from everstep.chaos.signals import Receivers
pid, lasts_s = int(sys.argv[1]), float(sys.argv[2])
print(Receivers([(pid, time.time())]).hold(lasts_s, subprocess.DEVNULL).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


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
    assert victim.wait(DEADLINE_S) == -signal.SIGKILL
    assert signals.send([(victim.pid, born)], signal.SIGKILL) == []


def test_only_this_runs_arenas_are_removed(tmp_path):
    """`kill-host` removed whatever folder a keeper's file named."""
    token = run_token(tmp_path)
    apart = Snapshot(failure_domain="group", segment_dir=str(tmp_path))
    mine = Segment.of(apart, run_id(token), 0)
    mine.create()
    other = tmp_path / "precious"
    other.mkdir()
    link = Segment.of(replace(apart, segment_dir=str(tmp_path / "links")), run_id(token), 2)
    link.root.mkdir()
    link.path.symlink_to(other)
    places = [
        Place(0, "h", "h:1", 77, str(mine.path), 0.0),
        Place(1, "h", "h:1", 77, str(other), 0.0),
        Place(1, "h", "h:1", 77, str(mine.path), 0.0),
        Place(0, "h", "h:1", 77, str(tmp_path / "x" / ".." / mine.path.name), 0.0),
        Place(2, "h", "h:1", 77, str(link.path), 0.0),
    ]
    assert [segment.path for segment in own_segments(tmp_path, places)] == [mine.path]


@pytest.mark.parametrize(
    ("groups", "spared", "there", "hit", "candidates"),
    [
        (3, [], (0, 2), [], [0, 2]),
        (3, [], (0, 2), [0], []),  # group 2 is the last that holds the state
        (1, [], (0,), [], [0]),  # there is no other
        (2, [0], (0, 1), [], [1]),  # the spared one counts as the one that is left
        (2, [0], (0, 1), [1], []),
    ],
)
def test_only_groups_that_take_part_may_be_hit_and_the_last_one_is_spared(
    tmp_path, groups, spared, there, hit, candidates
):
    view = View(tmp_path, spared)
    told = [("run_started", None, {"groups": groups})]
    told += [("workers_started", group, {"incarnation": 0, "pids": [2 + group]}) for group in there]
    told += [("commit", group, {"groups": list(there), "history": "1", "parent": "0"}) for group in there]
    view.apply(
        [
            {"t": t, "mono": t, "group": group, "rank": 0, "step": 1, "kind": kind} | fields
            for t, (kind, group, fields) in enumerate(told)
        ]
    )
    view.hit(hit)
    assert view.candidates(1) == candidates
