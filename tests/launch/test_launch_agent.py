"""An agent without a supervisor, as a batch job starts it."""

import os
import signal
import time

import psutil

from launched import DEADLINE_S, alive, until


def both_train(agent):
    return {event["rank"] for event in agent.events("commit")} == {0, 1}


def test_it_ends_when_its_workers_are_done_and_leaves_nothing_behind(agent):
    one = agent("--training.steps", "3")
    assert one.process.wait(60) == 0
    assert one.events("agent_ended")[0]["status"] == "done"
    assert list(one.temporary.iterdir()) == []


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
    assert one.process.wait(DEADLINE_S) == 4
    assert one.events("agent_ended")[0]["reason"] == "did not end within 1 s and was killed"
    assert time.monotonic() - asked >= 1.0
    until(lambda: not any(alive(child.pid) for child in below), "all below the agent to end")
