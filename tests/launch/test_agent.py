"""An agent without a supervisor, as a batch job starts it."""

import os
import signal
import time

import psutil
import pytest

from everstep.launch.worker import log_path
from everstep.run.exits import GAVE_UP_EXIT
from launched import DEADLINE_S, FULL, alive, on_a_full_disk, until


def both_train(agent):
    return {event["rank"] for event in agent.events("commit")} == {0, 1}


@pytest.mark.parametrize(("given", "found"), [("", max(1, len(os.sched_getaffinity(0)) // 2)), ("7", 7)])
def test_workers_of_a_batch_job_share_the_cores_unless_they_are_told_how_many(agent, given, found):
    one = agent("--training.steps", "3", job=7, environment={"OMP_NUM_THREADS": given})
    assert one.process.wait(60) == 0
    assert f"trains with {found} threads" in log_path(one.run_dir, 0, 0).read_text()
    assert one.events("agent_ended")[0]["status"] == "done"
    assert list(one.temporary.iterdir()) == []


def test_a_rank_that_is_done_earlier_leaves_the_others_to_go_on(agent):
    one = agent("--training.steps", "30", "--tiny.early", "1")
    first, second = one.wait_for("workers_started")["pids"]
    until(lambda: not alive(second), "rank 1 to end")
    assert alive(first)
    assert one.process.wait(60) == 0
    assert one.events("workers_died") == []
    assert one.events("commit", rank=0, step=30)
    assert one.events("agent_ended")[0]["status"] == "done"


def test_a_rank_that_leaves_with_status_0_before_it_is_done_has_died(agent):
    one = agent("--training.steps", "1000000", "--tiny.vanish", "1")
    died = one.wait_for("workers_died")
    assert (died["reason"], died["exitcodes"]) == ("rank 1 exited with status 0", {"1": 0})
    one.wait_for("workers_started", incarnation=1)


@on_a_full_disk
def test_an_agent_whose_output_is_on_a_full_disk_counts_deaths_and_says_how_it_ends(agent):
    one = agent("--training.steps", "9", "--tiny.fail_in", "2", ranks=1, output=FULL)
    assert one.process.wait(60) == GAVE_UP_EXIT
    assert len(one.events("workers_died")) == 3
    assert one.events("agent_ended")[0]["status"] == "failed"


def test_a_death_whose_slot_cannot_be_noted_is_one_all_the_same(agent, tmp_path):
    (tmp_path / "run/state").mkdir(parents=True)
    (tmp_path / "run/state/struck").write_text("as a full disk, this takes no folder")
    one = agent("--training.steps", "9", "--tiny.fail_in", "2", ranks=1)
    one.wait_for("workers_started", incarnation=1)
    assert "slot 2 of step 2 is not noted" in one.said()
    for text in (one.said(), log_path(one.run_dir, 0, 0).read_text()):
        assert "FileNotFoundError: there is no dataset" in text, "its traceback is in its own log and the agent's"


@on_a_full_disk
def test_workers_whose_log_is_on_a_full_disk_train(agent, tmp_path):
    log = log_path(tmp_path / "run", 0, 0)
    log.parent.mkdir(parents=True)
    log.symlink_to(FULL)
    one = agent("--training.steps", "3")
    assert one.process.wait(60) == 0
    assert one.events("workers_died") == []


def test_a_batch_systems_sigterm_to_every_process_is_a_clean_stop(agent):
    one = agent("--training.steps", "1000000")
    until(lambda: both_train(one), "both ranks to train")
    os.killpg(one.process.pid, signal.SIGTERM)
    assert one.process.wait(DEADLINE_S) == 0
    assert {event["rank"] for event in one.events("left")} == {0, 1}
    assert one.events("agent_ended")[0]["status"] == "stopped"


def test_workers_that_do_not_end_within_the_grace_time_are_killed(agent):
    one = agent("--training.steps", "1000000", stop_grace_s=1.0)
    until(lambda: both_train(one), "both ranks to train")
    below = psutil.Process(one.process.pid).children(recursive=True)
    os.kill(one.events("workers_started")[0]["pids"][0], signal.SIGSTOP)
    asked = time.monotonic()
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(DEADLINE_S) == 1
    assert one.events("agent_ended")[0]["reason"] == "did not end within 1 s and was killed"
    assert time.monotonic() - asked >= 1.0
    until(lambda: not any(alive(child.pid) for child in below), "all below the agent to end")


def test_a_stop_reaches_workers_that_missed_its_first_signal(agent):
    one = agent("--training.steps", "1000000", "--tiny.deaf", "1")
    until(lambda: both_train(one), "both ranks to train")
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(DEADLINE_S) == 0
    assert {event["rank"] for event in one.events("left")} == {0, 1}
