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
    child = Child("worker", rank, lambda child, code: ended.append([child.index, code]))
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
import json, multiprocessing, os, pathlib, signal, sys, threading, time

def end(status):
    sys.exit(status)

def fall(signum):
    os.kill(os.getpid(), signum)

def fail():
    raise KeyError("c4")

def say(fd):
    print(json.dumps([os.environ["RANK"], os.environ["ASKER"], sys.stdin.read(), os.read(fd, 9).decode()]))

def go_on():
    signal.pause()

def litter():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    pathlib.Path("litter").write_text(str(child.pid))
    signal.pause()

def train(argv):
    child = multiprocessing.Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    threading.Thread(target=time.sleep, args=(0.5,)).start()
    pathlib.Path("child").write_text(str(child.pid))
    if argv == ["fail"]:
        raise KeyError("c4")
"""


@pytest.fixture
def play(tmp_path):
    """Runs code of a launcher in a process of its own; what it printed last, as JSON."""
    (tmp_path / "forked_work.py").write_text(WORK)

    def _play(code, status=0):
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "ASKER": "me"}
        (tmp_path / "typed").write_text("what somebody types")
        with (tmp_path / "typed").open() as typed:
            done = ran([sys.executable, "-c", PROLOGUE + textwrap.dedent(code)], cwd=tmp_path, env=env, stdin=typed)
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return _play


def test_how_each_ended_is_told(play, tmp_path):
    ended = play(
        """
        for rank, (run, *args) in enumerate((("end", 0), ("end", 7), ("fall", 11), ("fail",), ("end", "no config"))):
            ask(rank, run, *args)
        until(lambda: len(ended) == 5)
        print(json.dumps(sorted(ended)))
        """
    )
    assert ended == [[0, 0], [1, 7], [2, -signal.SIGSEGV], [3, 1], [4, 1]]
    assert "KeyError: 'c4'" in (tmp_path / "rank-3.log").read_text()
    assert (tmp_path / "rank-4.log").read_text() == "no config\n"


def test_a_process_has_the_askers_environment_a_descriptor_and_no_terminal(play, tmp_path):
    play(
        """
        read, write = os.pipe()
        os.write(write, b"open")
        ask(0, "say", read)
        until(lambda: ended)
        print(json.dumps(ended))
        """
    )
    assert json.loads((tmp_path / "rank-0.log").read_text()) == ["0", "me", "", "open"]


def test_nothing_is_left_of_thirty_incarnations(play):
    """Neither descriptors nor processes, but for the guard."""
    first, last = play(
        """
        own, seen = psutil.Process(), []
        for _ in range(30):
            two = [ask(rank, "go_on") for rank in range(2)]
            for child in two:
                child.signal(signal.SIGKILL)
                children.forget(child.pid)
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


@pytest.mark.parametrize(("argv", "exitcode"), [([], 0), (["fail"], 1)])
def test_a_workers_daemons_end_with_it(play, argv, exitcode):
    """A dataloader's processes look for their parent only now and then."""
    ended, child, took_s = play(
        f"""
        child = Child("worker", 0, lambda child, code: ended.append([0, code]))
        env = {{"RANK": "0", "EVERSTEP_WORKERS_STARTED": "0"}}
        args = [".", 0, 0, "forked_work:train", {argv}]
        begun = time.monotonic()
        children.start(child, Request("everstep.launch.worker:start", args, Path("rank-0.log"), env))
        until(lambda: ended)
        took_s = time.monotonic() - begun
        until(lambda: state(int(Path("child").read_text())) in ("gone", "Z"))
        print(json.dumps([ended, state(int(Path("child").read_text())), took_s]))
        """
    )
    assert ended == [[0, exitcode]]
    assert child in ("gone", "Z")
    if not exitcode:
        assert took_s > 0.5, "a thread of its own is waited for"


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
