"""Every outcome for the ranks of a group, and every interleaving for a few groups and a lighthouse, within bounds. And
that both find what they are there to find: the same with a decision, or the histories, left out."""

import sys
from types import ModuleType

import pytest

from everstep.step import protocol
from simulation.models import groups, ranks

MEETS = "if not self.decisions.all_true(point, bool(met)):"
DECISIONS = {
    "gradients": ("        if not summed:\n", "        if broken:\n"),
    "rows": (MEETS, MEETS.replace("not self", 'not met if point == "rows" else not self')),
    "connect": (MEETS, MEETS.replace("not self", 'not met if point == "connect" else not self')),
    "vote": (
        "if tally is None or not same or not all(yes for yes, _ in votes):",
        "if tally is None or reason:",
    ),
}


def without(decision: str) -> type:
    """The protocol, in which each rank takes one decision by itself."""
    old, new = DECISIONS[decision]
    path = protocol.__file__
    with open(path) as file:
        source = file.read()
    assert source.count(old) == 1, f"{decision}: the protocol reads otherwise now"
    module = ModuleType("protocol_without_a_decision")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source.replace(old, new), path, "exec"), module.__dict__)  # noqa: S102
    # What an attempt comes to is compared with the real one's values.
    module.Turn = protocol.Turn
    return module.StepProtocol


@pytest.mark.parametrize(("size", "attempts", "deaths"), [(2, 2, 1), (3, 2, 0)])
@pytest.mark.parametrize("data_ends", [False, True])
def test_the_ranks_of_a_group_go_the_same_way(size: int, attempts: int, deaths: int, data_ends: bool) -> None:
    explored = ranks.explore(size, attempts, deaths, data_ends=data_ends)
    assert explored.problems == []
    assert explored.runs > 400
    assert explored.commits > 200


@pytest.mark.slow
@pytest.mark.parametrize(("size", "attempts", "deaths"), [(2, 4, 0), (2, 3, 1), (3, 2, 1), (3, 3, 0)])
def test_the_ranks_of_a_group_go_the_same_way_for_longer(size: int, attempts: int, deaths: int) -> None:
    explored = ranks.explore(size, attempts, deaths)
    assert explored.problems == []
    assert explored.runs > 2000


@pytest.mark.parametrize("decision", DECISIONS)
def test_a_decision_that_each_rank_takes_by_itself_parts_them(decision: str) -> None:
    assert ranks.explore(2, 2, 0, protocol=without(decision)).problems


@pytest.mark.parametrize("bounds", [groups.Bounds(2, 2, 2), groups.Bounds(3, 1, 1)])
def test_no_two_histories_are_summed_and_no_step_is_lost(bounds: groups.Bounds) -> None:
    explored = groups.explore(bounds)
    assert explored.wrong == {}
    assert explored.whole
    assert explored.stuck == 0
    assert explored.states > 3000


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [groups.Bounds(3, 1, 2), groups.Bounds(2, 3, 3), groups.Bounds(3, 2, 2)])
def test_no_two_histories_are_summed_and_no_step_is_lost_with_more_of_everything(bounds: groups.Bounds) -> None:
    explored = groups.explore(bounds)
    assert explored.wrong == {}
    assert explored.whole
    assert explored.stuck == 0


def test_groups_that_compare_no_histories_sum_two_of_them() -> None:
    assert "two histories are summed" in groups.explore(groups.Bounds(2, 2, 2), compare_histories=False).wrong
