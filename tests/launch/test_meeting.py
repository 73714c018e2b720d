"""How the agents of a group meet, and what a worker learns of its place in the group."""

import json
import os
import sys

import pytest

from everstep.launch import meeting
from everstep.launch.meeting import Meeting, Round
from everstep.launch.settings import GroupSettings
from everstep.run.beats import BeatFile, agent_beat_path
from everstep.run.fence import Fenced
from forked import ran
from launched import until

SCRIPT = "import json, os; print(json.dumps(dict(os.environ)))"


def test_a_worker_finds_what_torchrun_would_have_set(tmp_path):
    """Whatever this version of torchrun sets."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH")}
    options = ["--standalone", "--nproc-per-node", "1"]
    done = ran([sys.executable, "-m", "torch.distributed.run", *options, str(script)], env=environment)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for_the_agent = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
    of_its_own = {"TORCHELASTIC_ERROR_FILE"}
    ours = Round("run", "127.0.0.1", 1, 0, [1], None).environment(0, "role", 0)
    assert theirs.keys() - environment.keys() - for_the_agent == ours.keys() | of_its_own
    alike = ours.keys() - {
        "MASTER_ADDR",
        "MASTER_PORT",
        "ROLE_NAME",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_MAX_RESTARTS",
    }
    assert {name: theirs[name] for name in alike} == {name: ours[name] for name in alike}


def test_ranks_are_counted_over_nodes_of_any_size():
    place = Round("run", "n0", 29500, 1, [2, 3, 1], None)
    assert list(place.ranks) == [2, 3, 4]
    said = place.environment(3, "group-0", 5)
    assert (said["RANK"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"], said["WORLD_SIZE"]) == ("3", "1", "3", "6")
    assert (said["GROUP_RANK"], said["GROUP_WORLD_SIZE"], said["TORCHELASTIC_RESTART_COUNT"]) == ("1", "3", "5")


@pytest.fixture
def folder(tmp_path):
    """A run's folder, in which every node of the group beats."""
    for node in range(2):
        BeatFile(agent_beat_path(tmp_path, 0, node)).beat("watching")
    return tmp_path


def of_two(folder, node_rank, **more):
    settings = GroupSettings("", folder, 0, 1, node_rank + 1, "", job=7, nodes=2, node_rank=node_rank, **more)
    return Meeting(settings, "group-0.7.0")


def begun(*nodes):
    """Their rounds, once all have joined; whoever asks first has to ask again."""
    found = {}
    for node in nodes * 2:
        if node not in found and (place := node.next_round()):
            found[node] = place
    return [found[node] for node in nodes]


def test_a_round_begins_when_all_have_joined_it_and_all_know_where_its_store_is(folder):
    second = of_two(folder, 1)
    assert second.next_round() is None, "it is alone"
    first = of_two(folder, 0)
    places = begun(first, second)
    assert [(list(place.ranks), place.port) for place in places] == [([0], places[0].port), ([1, 2], places[0].port)]
    assert places[0].listener.getsockname() == ("127.0.0.1", places[0].port)
    assert not first.is_awaited
    assert second.next_round() is None, "its workers died"
    assert first.is_awaited
    assert begun(first, second)[0].port != places[0].port


def test_a_kill_is_told_for_its_round_and_an_end_by_all(folder):
    first, second = of_two(folder, 0), of_two(folder, 1)
    begun(first, second)
    first.tell_killed()
    assert (first.others_were_killed, second.others_were_killed) == (False, True)
    begun(first, second)
    assert not second.others_were_killed
    first.tell_ended()
    assert not first.all_ended
    second.tell_ended()
    assert first.all_ended
    assert second.all_ended


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_falls_silent_is_lost_unless_its_workers_have_ended(folder, monkeypatch, silent):
    nodes = [of_two(folder, 0), of_two(folder, 1)]
    other = nodes[1 - silent]
    begun(*nodes)
    monkeypatch.setattr(meeting, "SILENCE_S", 0.2)
    BeatFile(agent_beat_path(folder, 0, silent)).beat("watching")
    assert other.lost() == ""
    until(other.lost, "it to be missed")
    assert other.lost() == f"the agent on node {silent} of this group has been silent for 0.2 s"
    nodes[silent].tell_ended()
    assert other.lost() == ""


@pytest.mark.parametrize(("alone", "missing"), [(0, 1), (1, 0)])
def test_a_node_that_never_comes_is_not_waited_for_for_ever(folder, monkeypatch, alone, missing):
    monkeypatch.setattr(meeting, "ARRIVAL_S", 0.2)
    node = of_two(folder, alone)
    assert node.next_round() is None
    until(node.lost, "it to be missed")
    assert node.lost() == f"the agent on node {missing} of this group has not come within 0.2 s"


def test_a_node_does_not_come_twice_to_one_start_and_a_later_start_does_not_read_its_note(folder):
    begun(of_two(folder, 0), of_two(folder, 1))
    with pytest.raises(Fenced, match=r"an agent of node 1 has been .* higher --restart"):
        of_two(folder, 1)
    later = of_two(folder, 1, restart=1)
    assert later.next_round() is None
