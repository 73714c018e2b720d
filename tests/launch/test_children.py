"""Processes that a launcher forks."""

import json
import os
import signal
import sys
import textwrap

import pytest

from forked import ran
from launched import alive, until

PROLOGUE = """
import json, os, psutil, signal, sys, time
from pathlib import Path
from everstep.launch.children import Child, Children
from everstep.launch.forking import Request
from everstep.run.lifeline import adopt_orphans

adopt_orphans()
children = Children()
ended = []

def ask(rank, run, *args):
    child = Child(rank, lambda child: ended.append([child.index, child.exitcode]))
    children.start(child, Request(f"forked_work:{run}", list(args), Path(f"rank-{rank}.log"), {"RANK": str(rank)}))
    return child

def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        children.wait(0.1)

def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"
"""

WORK = """
import multiprocessing, pathlib, signal, time

def go_on():
    signal.pause()

def litter():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    pathlib.Path("litter").write_text(str(child.pid))
    signal.pause()
"""


@pytest.fixture
def play(tmp_path):
    """Runs code of a launcher in a process of its own; what it printed last, as JSON."""
    (tmp_path / "forked_work.py").write_text(WORK)

    def _play(code, status=0):
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        done = ran([sys.executable, "-c", PROLOGUE + textwrap.dedent(code)], cwd=tmp_path, env=env)
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return _play


def test_nothing_is_left_of_thirty_incarnations(play):
    """Neither descriptors nor processes, but for the guard."""
    first, last = play(
        """
        own, seen = psutil.Process(), []
        for _ in range(30):
            two = [ask(rank, "go_on") for rank in range(2)]
            for child in two:
                child.signal(signal.SIGKILL)
            until(lambda: not any(child.alive for child in two))
            seen.append([own.num_fds(), len(own.children(recursive=True))])
        print(json.dumps([seen[0], seen[-1]]))
        """
    )
    assert first == last
    assert last[1] == 1


def test_a_guard_that_was_killed_is_replaced_and_guards_what_was_there_before(play):
    """What is orphaned by the launcher's end is in the session of a child of its."""
    guard, known = play(
        """
        child = ask(0, "litter")
        until(lambda: Path("litter").exists())
        before = children._guard.pid
        os.kill(before, signal.SIGKILL)
        until(lambda: children._guard.pid != before and state(children._guard.pid) == "S")
        print(json.dumps([children._guard.pid, [child.pid, int(Path("litter").read_text())]]), flush=True)
        os.kill(children._guard.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        -signal.SIGKILL,
    )
    until(lambda: not any(map(alive, [guard, *known])), "all to end")


def test_a_rank_waits_for_its_predecessor_of_a_launcher_that_was_killed(tmp_path):
    hold = (
        "import sys, time; from pathlib import Path; from everstep.launch.worker import await_predecessor\n"
        "await_predecessor(Path(sys.argv[1]), 0, 0); print('mine', flush=True); time.sleep(float(sys.argv[2]))"
    )
    first = ran([sys.executable, "-c", hold, str(tmp_path), "0"])
    assert first.stdout == "mine\n", first.stderr
    both = (
        "import subprocess, sys, time\n"
        f"first = subprocess.Popen([sys.executable, '-c', {hold!r}, sys.argv[1], '1000'], stdout=subprocess.PIPE)\n"
        "first.stdout.readline()\n"
        f"second = subprocess.Popen([sys.executable, '-c', {hold!r}, sys.argv[1], '0'], stdout=subprocess.PIPE)\n"
        "time.sleep(1.5); waits = second.poll() is None; first.kill()\n"
        "print(waits, second.communicate()[0].decode().strip())"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = ran([sys.executable, "-c", both, str(tmp_path)], env=env)
    assert done.stdout == "True mine\n", done.stderr
