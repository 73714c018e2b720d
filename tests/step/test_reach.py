"""Groups whose heartbeats arrive and that cannot be connected to: the others go on without them and let them in again.

Real groups, Gloo and lighthouse, a model of four numbers; a wall in each process refuses or drops new connections.
"""

import time

import pytest

from harness import ENDLESS, check_states, newest

CONNECT_S = 2.0
BOUND_S = 3 * CONNECT_S
"""From the first quorum with one that cannot be reached to the next commit."""
OPTIONS = {"steps": ENDLESS, "slots": 6, "slot_s": 0.05, "connect_s": CONNECT_S, "quorum_s": 10, "heartbeat_s": 1.0}


@pytest.fixture
def run(begin):
    return begin(join_timeout_s=3.0, heartbeat_timeout_s=1.0)


def longest_pause(ranks, since, seconds):
    """Between two commits of anybody, from `since` for so many seconds."""
    time.sleep(max(0.0, since + seconds - time.monotonic()))
    for rank in ranks:
        rank.catch_up()
    times = sorted(commit["time"] for rank in ranks for commit in rank.commits.values() if commit["time"] > since)
    return max(later - earlier for earlier, later in zip([since, *times], [*times, since + seconds], strict=True))


def takes_part(run, ranks, groups):
    """Wait until a step is committed by just these groups, and say who is left out."""
    deadline = time.monotonic() + 30
    while True:
        newest(ranks)
        last = max((commit for rank in ranks for commit in rank.commits.values()), key=lambda c: (c["step"], c["time"]))
        if tuple(last["groups"]) == tuple(groups):
            break
        assert time.monotonic() < deadline, f"the last step was made by {last['groups']}"
        time.sleep(0.05)
    return run.events("left_out")[-1:]


@pytest.mark.parametrize(("how", "ranks"), [("drop", 1), ("refuse", 2)])
def test_a_joiner_that_cannot_be_reached_is_left_out_and_let_in_later(run, how, ranks):
    for group in (0, 1):
        run.wall(group, [2], how)
    groups = [run.ranks(group, ranks, **OPTIONS) for group in (0, 1)]
    going = [rank for group in groups for rank in group]
    for rank in going:
        rank.first()
    joiner = [rank.ready() for rank in run.ranks(2, ranks, **OPTIONS)]
    assert longest_pause(going, time.monotonic(), BOUND_S + 1) < BOUND_S
    [told] = takes_part(run, going, (0, 1))
    assert told["groups"] == [2]
    for group in (0, 1):
        (run.run_dir / f"wall-{group}").unlink()
    for rank in joiner:
        rank.first()
    [told] = takes_part(run, going, (0, 1, 2))
    assert told["groups"] == []
    for rank in (*going, *joiner):
        check_states(rank)


@pytest.mark.parametrize(
    ("walls", "stay"),
    [
        ({1: [0]}, (0, 2)),
        ({0: [1], 1: [0]}, (0, 2)),
        ({1: [0], 2: [0]}, (1, 2)),
    ],
    ids=["one way", "a pair", "the first one"],
)
def test_a_member_that_cannot_be_reached_any_more_is_left_out_and_let_in_later(run, walls, stay):
    """It loses its connections at the same time."""
    ranks = [run.group(group, **OPTIONS) for group in range(3)]
    for rank in ranks:
        rank.first()
    takes_part(run, ranks, (0, 1, 2))
    for group, to in walls.items():
        run.wall(group, to)
    (run.run_dir / f"drop-{stay[0]}").write_text(str(newest(ranks) + 3))
    assert longest_pause(ranks, time.monotonic(), BOUND_S + 1) < BOUND_S
    [told] = takes_part(run, ranks, stay)
    assert told["groups"] == [group for group in range(3) if group not in stay]
    for group in walls:
        (run.run_dir / f"wall-{group}").unlink()
    takes_part(run, ranks, (0, 1, 2))
    for rank in ranks:
        check_states(rank)
