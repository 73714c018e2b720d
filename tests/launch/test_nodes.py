"""Groups on several nodes, and nodes that are not fit to train on."""

import os
import signal
import time

import pytest

from everstep.launch import node as fitness
from everstep.launch.launcher import STARTS_WITHOUT_A_STEP
from everstep.run.directory import bad_node_file, over_file
from everstep.run.exits import GAVE_UP_EXIT, HOPELESS_EXIT, NODE_BAD_EXIT, UNFIT_EXIT
from everstep.run.files import read_json
from launched import DEADLINE_S, alive, until


def node(agent, rank, *flags, **settings):
    return agent("--training.steps", "1000000", *flags, ranks=1, nodes=2, node_rank=rank, job=7, **settings)


def ranks_that_train(one, after=0.0):
    return {event["rank"] for event in one.events("commit") if event["t"] > after}


def test_two_nodes_of_a_group_start_restart_and_stop_together(agent):
    second, first = node(agent, 1), node(agent, 0)  # whoever is there earlier waits
    until(lambda: ranks_that_train(first) == {0, 1}, "both ranks to train")
    before = {
        "first": first.events("workers_started")[0]["pids"],
        "second": first.events("node_workers_started")[0]["pids"],
    }
    for victim, other in (("second", "first"), ("first", "second")):
        killed = time.time()
        os.kill(before[victim][0], signal.SIGKILL)
        until(lambda since=killed: ranks_that_train(first, since + 0.5) == {0, 1}, "both ranks to train again")
        again = {
            "first": first.events("workers_started")[-1]["pids"],
            "second": first.events("node_workers_started")[-1]["pids"],
        }
        assert not alive(before[other][0]), "the node whose rank lived started it again as well"
        assert again[victim] != before[victim]
        before = again
    for one in (first, second):
        one.process.send_signal(signal.SIGTERM)
    assert {one.process.wait(DEADLINE_S) for one in (first, second)} == {0}
    assert {event["rank"] for event in first.events("left")} == {0, 1}


def test_a_node_whose_worker_dies_in_a_stop_does_not_keep_the_other(agent):
    nodes = first, _ = node(agent, 0), node(agent, 1)
    until(lambda: ranks_that_train(first) == {0, 1}, "both ranks to train")
    for one in nodes:
        one.process.send_signal(signal.SIGTERM)
    os.kill(first.events("node_workers_started")[0]["pids"][0], signal.SIGKILL)
    assert {one.process.wait(30) for one in nodes} <= {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_notices_that_another_one_is_gone(agent, lost):
    nodes = [node(agent, 0), node(agent, 1)]
    until(lambda: ranks_that_train(nodes[0]) == {0, 1}, "both ranks to train")
    nodes[lost].process.kill()
    survivor = nodes[1 - lost]
    assert survivor.process.wait(DEADLINE_S) == 1
    ended = survivor.events("agent_ended")[-1]
    assert ended["status"] == "crashed"
    assert f"node {lost} of this group" in ended["reason"]


def test_a_slot_that_ends_every_group_gives_all_of_them_up_in_batch_jobs_as_well(agent):
    """There is no supervisor: the agents find it out by themselves, each in its own job."""
    arguments = "--training.steps", "9", "--tiny.fail_in", "6"
    agents = [agent(*arguments, group=group, groups=2, ranks=1, job=7 + group) for group in range(2)]
    assert {one.process.wait(DEADLINE_S) for one in agents} == {GAVE_UP_EXIT}
    (poison,) = agents[0].events("poison_slot")
    assert (poison["step"], poison["slot"], poison["groups"], poison["action"]) == (6, 2, [0, 1], "stop")
    for group, one in enumerate(agents):
        over = read_json(over_file(one.run_dir, group))
        assert over["status"] == "failed"
        assert "slot 2 of step 6 ended the workers of group(s) 0, 1" in over["reason"]
        assert "FileNotFoundError" in over["reason"]


def test_a_group_that_its_second_node_gives_up_is_over(agent):
    """A batch system would start it again otherwise."""
    first, second = node(agent, 0), node(agent, 1, "--tiny.exit", str(HOPELESS_EXIT))
    assert second.process.wait(DEADLINE_S) == GAVE_UP_EXIT
    over = read_json(over_file(first.run_dir, 0))
    assert over["status"] == "failed"
    assert "no use" in over["reason"]


def test_a_rank_that_is_killed_on_one_node_is_no_failure_of_its_peers_on_another(agent):
    """As often as you like, also before the first step."""
    first, second = (node(agent, rank, "--tiny.first_s", "1000") for rank in (0, 1))
    for incarnation in range(STARTS_WITHOUT_A_STEP + 1):
        until(lambda n=2 * incarnation + 2: len(first.events("training_started")) == n, "both ranks to train")
        (victim,) = first.wait_for("workers_started", incarnation=incarnation)["pids"]
        (peer,) = first.wait_for("node_workers_started", incarnation=incarnation)["pids"]
        os.kill(peer, signal.SIGUSR1)  # what a trainer whose peer is gone does
        os.kill(victim, signal.SIGKILL)
    until(lambda: len(first.events("training_started")) == 2 * incarnation + 4, "both ranks to train again")
    assert first.process.poll() is None
    assert second.process.poll() is None
    died = first.events("workers_died")
    assert any(one["exitcodes"] == {"1": 1} for one in died), "a peer failed before it was ended"
    assert not any(one["by_itself"] for one in died)


def test_a_node_that_waits_for_the_others_of_its_group_can_be_stopped(agent):
    alone = node(agent, 1)
    until((alone.run_dir / "logs/group-0/imports.log").exists, "the agent to be up")
    alone.process.send_signal(signal.SIGTERM)
    assert alone.process.wait(DEADLINE_S) == 0
    assert alone.events("commit") == []


@pytest.mark.parametrize(
    ("flags", "settings", "reason"),
    [
        (("--tiny.exit", str(UNFIT_EXIT)), {}, "arithmetic"),
        (("--tiny.exit", "1"), {"node_failures": 2}, "died here 2 times"),
    ],
)
def test_a_bad_node_is_named_and_left(agent, tmp_path, flags, settings, reason):
    one = agent(*flags, "--training.steps", "1000000", ranks=1, job=7, restart=1, node="n3", **settings)
    assert one.process.wait(DEADLINE_S) == NODE_BAD_EXIT
    found = read_json(bad_node_file(tmp_path / "run", 0))
    assert (found["node"], found["claim"]) == ("n3", "7.1")
    assert reason in found["reason"]
    assert one.events("node_bad")[0]["node"] == "n3"
    assert not over_file(tmp_path / "run", 0).exists(), "the group goes on elsewhere"


def test_without_another_node_to_go_to_an_unfit_one_is_the_end(agent):
    one = agent("--tiny.exit", str(UNFIT_EXIT), "--training.steps", "1000000", ranks=1)
    assert one.process.wait(DEADLINE_S) == GAVE_UP_EXIT


def test_a_healthy_node_has_no_complaint_and_one_that_cannot_write_has(tmp_path, monkeypatch):
    assert fitness.storage_complaint(tmp_path) == ""
    assert not list(tmp_path.glob("**/.fit-*"))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in fitness.storage_complaint(tmp_path / "file")
    monkeypatch.setattr(fitness, "SMALLEST_FREE_BYTES", 1 << 60)
    assert "/dev/shm has" in fitness.storage_complaint(tmp_path)
