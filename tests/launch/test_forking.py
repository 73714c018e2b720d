"""Processes forked from a fork point, and the workers that an agent makes of them."""

import json
import os
import signal
import sys
import textwrap

import pytest

from forked import ran

PROLOGUE = """
import json, os, signal, sys, time
from pathlib import Path
from everstep.launch import worker
from everstep.launch.forking import ForkPoint
from everstep.launch.workers import Request, Workers
import forked_work

def requests(*calls):
    return [
        Request(rank, f"forked_work:{run}", list(args), Path(f"rank-{rank}.log"), {"RANK": str(rank)})
        for rank, (run, *args) in enumerate(calls)
    ]

def wait(workers):
    while workers.running:
        workers.wait(10.0)
    return [(one.rank, one.exitcode) for one in workers.ended]

def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"

def own():
    tasks = Path(f"/proc/{os.getpid()}/task")
    children = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    return len(os.listdir("/proc/self/fd")), len(children)

workers = Workers(ForkPoint())
"""

WORK = """
import json, multiprocessing, os, pathlib, signal, sys, threading, time

def end(status):
    sys.exit(status)

def fall(signum):
    os.kill(os.getpid(), signum)

def fail():
    raise KeyError("c4")

def say():
    print(json.dumps([os.environ["RANK"], os.environ["ASKER"], sys.stdin.read()]))

def go_on():
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
    """Runs code with a fork point in a process of its own; what it printed last, as JSON."""
    (tmp_path / "forked_work.py").write_text(WORK)

    def _play(code):
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "ASKER": "me"}
        (tmp_path / "typed").write_text("what somebody types")
        with (tmp_path / "typed").open() as typed:
            done = ran([sys.executable, "-c", PROLOGUE + textwrap.dedent(code)], cwd=tmp_path, env=env, stdin=typed)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return _play


def test_how_each_ended_is_told(play, tmp_path):
    ended = play(
        """
        workers.start(requests(("end", 0), ("end", 7), ("fall", 11), ("fail",), ("end", "no config")))
        print(json.dumps(sorted(wait(workers))))
        """
    )
    assert ended == [[0, 0], [1, 7], [2, -signal.SIGSEGV], [3, 1], [4, 1]]
    assert "KeyError: 'c4'" in (tmp_path / "rank-3.log").read_text()
    assert (tmp_path / "rank-4.log").read_text() == "no config\n"


def test_deaths_are_told_in_their_order_however_late_somebody_looks(play):
    for order in ([2, 0, 1], [1, 2, 0]):
        told = play(
            f"""
            workers.start(requests(*[("go_on",)] * 3))
            for rank in {order}:
                os.kill(workers.pids[rank], signal.SIGKILL)
                while state(workers.pids[rank]) != "Z":
                    time.sleep(0.001)
            print(json.dumps(wait(workers)))
            """
        )
        assert told == [[rank, -signal.SIGKILL] for rank in order]


def test_a_process_has_the_askers_environment_and_its_own_and_no_terminal(play, tmp_path):
    play('workers.start(requests(("say",))); print(json.dumps(wait(workers)))')
    assert json.loads((tmp_path / "rank-0.log").read_text()) == ["0", "me", ""]


def test_nothing_is_left_of_thirty_incarnations(play):
    """Neither descriptors nor children, of which the fork point is one."""
    first, last, below = play(
        """
        seen = []
        for _ in range(30):
            workers.start(requests(*[("go_on",)] * 2))
            workers.stop()
            seen.append(own())
        fork_point = psutil.Process(workers._fork_point.pid)
        workers._fork_point.reap()
        while fork_point.children():
            time.sleep(0.01)
        print(json.dumps([seen[0], seen[-1], [len(fork_point.children()), fork_point.num_fds()]]))
        """.replace("seen = []", "import psutil\n        seen = []")
    )
    assert first == last
    assert last[1] == 1
    assert below == [0, 4], "standard streams and the channel"


def test_nobody_else_has_the_pid_of_a_worker_before_the_next_ones_are_started(play):
    """A signal may be on its way to it."""
    states = play(
        """
        workers.start(requests(("end", 0), ("go_on",)))
        (first, second) = workers.pids.values()
        while not workers.ended:
            workers.wait(10.0)
        time.sleep(0.2)
        states = [state(first)]
        workers.signal(signal.SIGTERM, [0])
        workers.stop()
        states.append(state(second))
        workers.start(requests(("go_on",)))
        print(json.dumps([*states, state(first), state(second)]))
        """
    )
    assert states == ["Z", "Z", "gone", "gone"]


def test_a_worker_that_dies_while_others_are_still_forked_is_told(play):
    ended, running = play(
        """
        workers.start(requests(("fall", 9), *[("go_on",)] * 6))
        while not workers.ended:
            workers.wait(10.0)
        print(json.dumps([[(one.rank, one.exitcode) for one in workers.ended], workers.running]))
        """
    )
    assert ended == [[0, -signal.SIGKILL]]
    assert running == [1, 2, 3, 4, 5, 6]


def test_more_processes_can_be_asked_for_than_a_channel_holds_requests(play):
    ranks = play(
        """
        import threading
        pid = workers._fork_point.pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (pid, signal.SIGCONT)).start()
        padding = "x" * 4000
        workers.start([
            Request(rank, "forked_work:end", [0], Path("rank.log"), {"PADDING": padding}) for rank in range(100)
        ])
        print(json.dumps(sorted(rank for rank, _ in wait(workers))))
        """
    )
    assert ranks == list(range(100))


def test_nobody_answers_for_a_warm_process_that_has_died(play):
    """Its maker sees to that when it finds it dead."""
    answers = play(
        """
        from everstep.launch.warm import WarmProcess
        warm = WarmProcess((), Path("warm.log"))
        os.kill(warm.pid, signal.SIGKILL)
        os.waitpid(warm.pid, 0)
        warm.fork("forked_work:end", [0], Path("rank.log"))
        print(json.dumps([warm.answers(), warm.gone]))
        """
    )
    assert answers == [[], True]


def test_workers_die_with_their_fork_point_stopped_or_not_and_no_others_can_be_started(play):
    ended, states, said = play(
        """
        workers.start(requests(("go_on",), ("go_on",)))
        os.kill(workers.pids[0], signal.SIGSTOP)
        os.kill(workers._fork_point.pid, signal.SIGKILL)
        ended = wait(workers)
        deadline = time.monotonic() + 10
        while {state(pid) for pid in workers.pids.values()} - {"gone", "Z"} and time.monotonic() < deadline:
            time.sleep(0.01)
        states = [state(pid) for pid in workers.pids.values()]
        try:
            workers.start(requests(("go_on",)))
        except RuntimeError as error:
            print(json.dumps([ended, states, str(error)]))
        """
    )
    assert ended == [[0, -signal.SIGKILL], [1, -signal.SIGKILL]]
    assert set(states) <= {"gone", "Z"}
    assert said == "the fork point of this agent has died; a new agent has to take over"


@pytest.mark.parametrize("while_asked", [True, False])
def test_a_fork_point_that_has_died_starts_nobody(play, while_asked):
    said = play(
        f"""
        import threading
        pid = workers._fork_point.pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        if not {while_asked}:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        try:
            workers.start(requests(("go_on",)))
        except RuntimeError as error:
            print(json.dumps(str(error)))
        """
    )
    assert said == "the fork point of this agent has died; a new agent has to take over"


def test_a_fork_point_that_hangs_is_not_waited_for_for_ever(play):
    said, again_s = play(
        """
        from everstep.launch import workers as room
        room.ANSWER_TIMEOUT_S = 1.0
        workers.start(requests(("go_on",)))
        os.kill(workers._fork_point.pid, signal.SIGSTOP)
        try:
            workers.stop()
        except RuntimeError as error:
            begun = time.monotonic()
            workers.stop()
            print(json.dumps([str(error), time.monotonic() - begun]))
        """
    )
    assert "has said nothing for 1 s of the workers [" in said
    assert again_s < 0.5


def test_a_stop_for_every_process_of_a_job_passes_the_fork_point_by(play):
    ended = play(
        """
        workers.start(requests(("go_on",)))
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(workers._fork_point.pid, signum)
        workers.stop()
        workers.start(requests(("end", 3)))
        print(json.dumps(wait(workers)))
        """
    )
    assert ended == [[0, 3]]


@pytest.mark.parametrize(("argv", "exitcode"), [([], 0), (["fail"], 1)])
def test_a_workers_daemons_end_with_it(play, tmp_path, argv, exitcode):
    """A dataloader's processes look for their parent only now and then."""
    ended, child, took_s = play(
        f"""
        env = {{"RANK": "0", "EVERSTEP_WORKERS_STARTED": "0"}}
        args = [".", 0, 0, "forked_work:train", {argv}]
        begun = time.monotonic()
        workers.start([Request(0, "everstep.launch.worker:start", args, Path("rank-0.log"), env)])
        ended, took_s = wait(workers), time.monotonic() - begun
        time.sleep(0.5)
        print(json.dumps([ended, state(int(Path("child").read_text())), took_s]))
        """
    )
    assert ended == [[0, exitcode]]
    assert child in ("gone", "Z")
    if not exitcode:
        assert took_s > 0.5, "a thread of its own is waited for"
