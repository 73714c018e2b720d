"""Groups on several nodes, and groups that leave a bad node."""

import os
import re
import signal
import time

import pytest

from everstep.launch.launcher import STARTS_WITHOUT_A_STEP
from everstep.launch.rendezvous import ARRIVAL_S, Rendezvous
from everstep.launch.settings import GroupSettings
from everstep.run.directory import bad_node_file, over_file
from everstep.run.exits import FENCED_EXIT, NODE_BAD_EXIT, UNFIT_EXIT
from everstep.run.files import read_json
from launched import DEADLINE_S, alive, until


def node(agent, rank, *flags, **settings):
    return agent("--training.steps", "1000000", *flags, ranks=1, nodes=2, node_rank=rank, job=7, **settings)


def ranks_that_train(one, after=0.0):
    return {event["rank"] for event in one.events("training_started") if event["t"] > after}


def test_two_nodes_of_a_group_start_restart_and_stop_together(agent):
    second, first = node(agent, 1), node(agent, 0)  # the earlier one waits for the other
    until(lambda: ranks_that_train(first) == {0, 1}, "both ranks to train")

    def started():
        kinds = {"first": "workers_started", "second": "node_workers_started"}
        return {node: first.events(kind)[-1]["pids"] for node, kind in kinds.items()}

    before = started()
    for victim, other in (("second", "first"), ("first", "second")):
        killed = time.time()
        os.kill(before[victim][0], signal.SIGKILL)
        until(lambda since=killed: ranks_that_train(first, since + 0.5) == {0, 1}, "both ranks to train again")
        again = started()
        assert not alive(before[other][0]), "the node whose rank lived started it again as well"
        assert again[victim] != before[victim]
        before = again
    for one in (first, second):
        one.process.send_signal(signal.SIGTERM)
    assert {one.process.wait(DEADLINE_S) for one in (first, second)} == {0}
    assert {event["rank"] for event in first.events("left")} == {0, 1}


def test_a_node_that_never_comes_ends_the_wait_of_the_others(tmp_path):
    waits = Rendezvous(GroupSettings(tmp_path, 0, 1, nodes=2))
    assert waits.lost(time.monotonic() + ARRIVAL_S - 10.0, 0.0) == ""
    assert "node 1 of this group has not joined" in waits.lost(time.monotonic() + ARRIVAL_S + 10.0, 0.0)


def test_a_node_that_is_done_starts_again_with_one_whose_rank_is_killed_late(agent):
    """Otherwise each would wait for the other."""
    first, second = (node(agent, rank, "--training.steps", "9") for rank in (0, 1))
    (late,) = first.wait_for("node_workers_started")["pids"]
    until(lambda: ranks_that_train(first) == {0, 1}, "both ranks to train")
    os.kill(late, signal.SIGSTOP)
    first.wait_for("training_done", rank=0)
    os.kill(late, signal.SIGKILL)
    first.wait_for("workers_started", incarnation=1)
    assert {one.process.wait(DEADLINE_S) for one in (first, second)} == {0}
    assert first.events("agent_ended")[0]["status"] == "done"


def test_an_agent_that_takes_anothers_place_on_its_node_goes_on_with_the_group(agent):
    first, second = (node(agent, rank) for rank in (0, 1))
    until(lambda: ranks_that_train(first) == {0, 1}, "both ranks to train")
    assert node(agent, 1).process.wait(DEADLINE_S) == FENCED_EXIT, "its place is taken"
    for rank, gone in ((1, second), (0, first)):
        killed = time.time()
        gone.process.kill()
        gone.process.wait(DEADLINE_S)
        again = node(agent, rank)
        until(lambda since=killed: ranks_that_train(first, since) == {0, 1}, "both ranks to train again")
    assert again.process.poll() is None


def test_a_rank_that_is_killed_on_one_node_is_no_failure_of_its_peers_on_another(agent):
    """This holds for any number of kills, and before the first step too."""
    first, second = (node(agent, rank, "--tiny.first_s", "1000") for rank in (0, 1))
    for incarnation in range(STARTS_WITHOUT_A_STEP + 1):
        until(lambda n=2 * incarnation + 2: len(first.events("training_started")) == n, "both ranks to train")
        (victim,) = first.wait_for("workers_started", incarnation=incarnation)["pids"]
        (peer,) = first.wait_for("node_workers_started", incarnation=incarnation)["pids"]
        os.kill(peer, signal.SIGUSR1)  # the tiny trainer fails, as a trainer does whose peer is gone
        os.kill(victim, signal.SIGKILL)
    until(lambda: len(first.events("training_started")) == 2 * incarnation + 4, "both ranks to train again")
    assert first.process.poll() is None
    assert second.process.poll() is None
    died = first.events("workers_died")
    assert any(one["exitcodes"] == {"1": 1} for one in died), "a peer failed before it was ended"
    assert not any(one["by_itself"] for one in died)
    assert not any(first.run_dir.glob("state/struck/*/*")), "nor of the slot"


def test_a_node_on_which_a_worker_cannot_even_be_killed_is_left(agent, tmp_path):
    """All workers hang in the kernel, or one is there when another dies. Without another node the agent waits."""
    away, waits = (
        agent(group=group, job=7 + group, node=node, unkillable=True, stall_timeout_s=5.0)
        for group, node in enumerate(("n3", ""))
    )
    for group, (one, signum) in enumerate(((away, signal.SIGSTOP), (waits, signal.SIGKILL))):
        until(lambda one=one, group=group: len(one.events("commit", group=group)) > 9, "both to make steps")
        for pid in one.events("workers_started", group=group)[0]["pids"][: 2 - group]:
            os.kill(pid, signum)
    assert away.process.wait(DEADLINE_S) == NODE_BAD_EXIT
    found = read_json(bad_node_file(tmp_path / "run", 0))
    assert re.fullmatch(r"rank 0 \(process \d+\) has not ended since it was killed 1 s ago", found["reason"])
    assert "rank 1 (process" in waits.wait_for("resource_shortage", group=1)["reason"]
    waits.process.send_signal(signal.SIGTERM)
    assert (waits.process.wait(DEADLINE_S), waits.events("agent_ended", group=1)[0]["status"]) == (1, "killed")


@pytest.mark.parametrize(("status", "settings", "reason"), [
    (UNFIT_EXIT, {}, "results or data wrong"), (1, {"node_failures": 2}, "died here 2 times"),
])  # fmt: skip
def test_a_bad_node_is_named_and_left(agent, tmp_path, status, settings, reason):
    one = agent("--tiny.exit", str(status), ranks=1, job=7, restart=1, node="n3", **settings)
    assert one.process.wait(DEADLINE_S) == NODE_BAD_EXIT
    found = read_json(bad_node_file(tmp_path / "run", 0))
    assert (found["node"], found["claim"]) == ("n3", "7.1")
    assert reason in found["reason"]
    assert one.events("node_bad")[0]["node"] == "n3"
    assert not over_file(tmp_path / "run", 0).exists(), "the group goes on elsewhere"
