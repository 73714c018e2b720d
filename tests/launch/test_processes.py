"""What a run survives, and that no process survives a run. With real processes and signals."""

import os
import pty
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from everstep.launch.worker import OOM_SCORE
from everstep.run.beats import beat_path
from everstep.run.directory import groups_file
from everstep.run.files import write_json
from everstep.run.stops import SAME_S
from forked import ran
from launched import DEADLINE_S, alive, until

ENDLESS = ("--training.steps", "1000000")


@pytest.fixture(scope="module")
def run(start):
    """Two groups of two ranks that train until the end of this module."""
    run = start(2, 2, *ENDLESS)
    for group in range(2):
        for rank in range(2):
            run.wait_for("training_started", group=group, rank=rank)
    return run


@pytest.fixture(scope="module")
def other(start):
    """A second run on the same machine, with a terminal of its own, which is full, as nobody reads it."""
    controller, terminal = pty.openpty()
    os.set_blocking(terminal, False)
    os.write(terminal, bytes(1 << 20))
    os.set_blocking(terminal, True)
    run = start(1, 1, *ENDLESS, terminal=terminal)
    os.close(terminal)
    run.controller = controller
    return run


def test_two_runs_on_one_machine_do_not_meet(run, other):
    other.wait_for("commit", group=0)
    addresses = [r.events("lighthouse_started")[0]["address"] for r in (run, other)]
    assert addresses[0] != addresses[1]
    run.wait_for("commit", after=time.time())


def test_everything_listens_on_loopback_only(run):
    listening = [
        (process.pid, connection.laddr.ip)
        for process in run.tree()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3, "the lighthouse and the groups' stores at least"
    assert {ip.removeprefix("::ffff:") for _, ip in listening} == {"127.0.0.1"}


def test_the_kernel_takes_a_workers_memory_before_the_launchers(run):
    scores = {pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (run.process.pid, *run.workers(0))}
    launcher, *workers = scores.values()
    assert all(worker == min(launcher + OOM_SCORE, 1000) for worker in workers)


def test_a_killed_worker_takes_its_group_down_and_is_replaced_warm(run):
    first, second = run.workers(0)
    others = run.workers(1)
    killed = time.time()
    os.kill(second, signal.SIGKILL)
    assert "rank 1 was killed by SIGKILL" in run.wait_for("workers_died", after=killed, group=0)["reason"]
    up = run.wait_for("worker_up", after=killed, group=0)
    assert up["cpu_s"] < 0.5, "a worker that imports torch alone computes for longer"
    assert not alive(first)
    run.wait_for("commit", after=up["t"], group=0)
    assert run.workers(1) == others, "the other group goes on"


def test_a_stopped_worker_is_noticed_and_its_group_restarted(run):
    stopped = time.time()
    victim = run.workers(1)[0]
    os.kill(victim, signal.SIGSTOP)
    stall = run.wait_for("workers_stalled", after=stopped, group=1)
    assert (stall["phase"], stall["stalled_rank"]) == ("compute", 0)
    assert stall["idle_s"] >= 3.0
    run.wait_for("commit", after=stall["t"], group=1, rank=0)
    stacks = (run.run_dir / "logs/group-1/rank-1.stacks").read_text()
    assert "tiny_trainer.py" in stacks
    assert "in main" in stacks
    assert not alive(victim)


def test_a_lighthouse_that_hangs_is_replaced(run):
    before = run.events("lighthouse_started")[-1]
    stopped = time.time()
    os.kill(before["pid"], signal.SIGSTOP)
    assert run.wait_for("lighthouse_died", after=stopped)["reason"] == "did not answer"
    assert run.wait_for("lighthouse_started", after=stopped)["address"] == before["address"]
    assert not alive(before["pid"])


def test_nobody_is_taken_for_hung_after_all_were_stopped(run):
    """As when a batch system suspends a job, or docker pauses a container."""
    before = [run.workers(group) for group in range(2)]
    tree, stopped = run.tree(), time.time()
    for process in tree:
        process.suspend()
    time.sleep(7.0)  # longer than workers and the lighthouse may be silent
    for process in tree:
        process.resume()
    resumed = time.time()
    for group in range(2):
        run.wait_for("commit", after=resumed + 1.0, group=group)
    assert [run.workers(group) for group in range(2)] == before
    assert not [one for one in run.events("workers_stalled") if one["t"] > stopped]


def test_a_leaving_group_that_dies_does_not_fail_the_run_that_goes_on_without_it(start):
    run = start(3, 1, "--training.steps", "400")
    for group in range(3):
        run.wait_for("commit", group=group)
    os.kill(run.workers(1)[0], signal.SIGSTOP)  # it cannot end cleanly
    write_json(groups_file(run.run_dir), {"groups": 1})
    opened = psutil.Process(run.process.pid).open_files
    until(lambda: not any("agent-2" in file.path for file in opened()), "what a group that left had open to be closed")
    run.wait_for("agent_ended", group=0, status="done")
    os.kill(run.workers(1)[0], signal.SIGKILL)
    assert run.process.wait(DEADLINE_S) == 0
    assert not beat_path(run.run_dir, 1, 0).exists(), "no group would wait for its state"


def test_a_run_that_its_launcher_cannot_go_on_with_says_why_it_ends(start):
    run = start(1, 1, *ENDLESS)
    run.wait_for("commit")
    (run.run_dir / "state").rename(run.run_dir / "elsewhere")
    (run.run_dir / "state").write_text("")
    assert run.process.wait(DEADLINE_S) == 1
    (ended,) = run.events("run_ended")
    assert (ended["status"], "Not a directory" in ended["reason"]) == ("failed", True)
    assert "Traceback" not in run.console()


def test_a_run_directory_belongs_to_one_live_run(run, start):
    second = type(run)(run.run_dir, 2, 2, *ENDLESS, temporary=run.temporary)
    assert second.process.wait(DEADLINE_S) == 2
    assert f"in use by a run that is still going (pid {run.process.pid})" in second.console()


def test_ctrl_c_twice_ends_a_run_at_once_but_not_what_passes_on_the_first(other):
    tree = other.tree()
    os.kill(other.workers(0)[0], signal.SIGSTOP)  # it cannot end cleanly
    os.write(other.controller, b"\x03")
    other.process.send_signal(signal.SIGTERM)  # as `timeout` and others do
    other.wait_for("stopping")
    time.sleep(2 * SAME_S)
    assert other.process.poll() is None
    stopping = time.monotonic()
    os.write(other.controller, b"\x03")
    assert other.process.wait(DEADLINE_S) == 130
    assert time.monotonic() - stopping < DEADLINE_S / 2, "its workers may take as long as that"
    until(lambda: not any(alive(p.pid) for p in tree), "every process of the run to be gone")


def test_an_outage_that_all_groups_meet_does_not_end_a_run_that_has_made_steps(start):
    """For instance of the file system of their data, without which a start finds its configuration invalid."""
    run = start(2, 1, *ENDLESS)
    for group in range(2):
        run.wait_for("commit", group=group)
    (run.run_dir / "data-is-away").touch()
    for group in range(2):
        os.kill(run.workers(group)[0], signal.SIGUSR1)
    for group in range(2):
        run.until(lambda g=group: len(run.events("workers_died", group=g)) > 2, "two starts of it to fail")
    (run.run_dir / "data-is-away").unlink()
    for group in range(2):
        run.wait_for("commit", after=time.time(), group=group)
    (run.run_dir / "data-is-away").touch()
    for group in range(2):
        os.kill(run.workers(group)[0], signal.SIGUSR1)
    run.until(lambda: all(len(run.events("workers_died", group=g)) > 6 for g in range(2)), "both to wait for long")
    run.process.send_signal(signal.SIGINT)
    ended = run.process.wait(DEADLINE_S), run.events("run_ended")[0]["reason"].rpartition("; ")[2]
    assert ended == (1, "no group was training that could save it")


def test_with_nohup_a_run_outlives_its_terminal(start):
    run = start(1, 1, *ENDLESS, "--tiny.nohup")
    step = run.wait_for("commit")["step"]
    run.process.send_signal(signal.SIGHUP)
    run.until(lambda: run.events("commit")[-1]["step"] > step + 100, "more steps than a stop would take")
    assert run.events("stopping") == []
    run.process.send_signal(signal.SIGINT)
    assert (run.process.wait(DEADLINE_S), run.events("run_ended")[0]["reason"]) == (0, "stopped cleanly")


def test_nothing_that_a_worker_started_outlives_its_incarnation_or_the_launcher(start):
    run = start(2, 1, *ENDLESS, "--tiny.litter", forked=False)
    for group in range(2):
        run.wait_for("commit", group=group)
    known = [int(pid) for pid in run.events("warning", group=0)[-1]["text"].split()]
    assert len(known) == 3
    assert all(map(alive, known))
    guard = min(psutil.Process(run.process.pid).children(), key=lambda child: child.create_time())
    guard.kill()
    os.kill(run.workers(0)[0], signal.SIGKILL)
    again = run.wait_for("workers_started", group=0, incarnation=1)
    assert not any(map(alive, known)), "they are gone before the next incarnation starts"
    run.wait_for("commit", after=again["t"], group=0)

    tree = run.tree()
    assert len(tree) == 3 + 2 + 2 * 3, "launcher, its guard, lighthouse; a worker of each group, what it started"
    os.kill(run.workers(1)[0], signal.SIGSTOP)
    run.process.kill()
    run.process.wait()
    until(lambda: not any(alive(process.pid) for process in tree), "all processes to die")

    again = type(run)(run.run_dir, 1, 1, "--training.steps", "5", temporary=run.temporary)
    assert again.process.wait(DEADLINE_S) == 0
    assert list(run.temporary.iterdir()) == [], "what the killed one left behind is cleared away as well"


def test_a_finished_worker_waits_for_a_pools_work_and_not_for_its_idle_threads():
    code = (
        "import time; from concurrent.futures import ThreadPoolExecutor; from everstep.launch import worker\n"
        "begin, pool = time.monotonic(), ThreadPoolExecutor()\n"
        "work = pool.submit(time.sleep, 0.5)\n"
        "worker._let_others_end()\n"
        "print(work.done(), time.monotonic() - begin < worker.EXIT_TIMEOUT_S / 2)"
    )
    assert ran([sys.executable, "-c", code]).stdout == "True True\n"
