"""Which slot is poison is read from what the agents leave in the run directory."""

import pytest

from everstep.run.poison import deaths_at, first_to_tell, strike


def strikes(run_dir, groups, worked=True, slot=(7, 3)):
    for number, group in enumerate(groups):
        strike(run_dir, slot, group, number, worked=worked)
    return deaths_at(run_dir, slot)


@pytest.mark.parametrize(
    ("struck", "groups", "worked", "poisoned"),
    [
        ([], 3, True, False),
        ([0, 1], 8, True, False),
        ([0, 1, 5], 8, True, True),
        ([2, 2, 2, 2], 3, True, False),  # its own trouble
        ([0, 1, 0], 2, True, True),
        ([0, 1], 2, True, False),  # two deaths may be chance
        ([0, 0, 0], 1, True, True),
        ([0, 1, 2], 3, False, False),  # workers that never committed a step would end at every slot
    ],
)
def test_deaths_of_as_many_groups_as_there_are_up_to_three_make_a_slot_poison(
    tmp_path, struck, groups, worked, poisoned
):
    assert strikes(tmp_path, struck, worked).poisoned(groups) == poisoned


def test_one_of_all_tells(tmp_path):
    deaths = strikes(tmp_path, [0, 1, 2])
    assert [first_to_tell(tmp_path, (7, 3)) for _ in range(3)] == [True, False, False]
    assert deaths_at(tmp_path, (7, 3)) == deaths
