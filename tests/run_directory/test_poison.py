"""Which slot is poison is read from what the agents leave in the run directory."""

from everstep.run.poison import deaths_at, first_to_tell, strike, why_at


def strikes(run_dir, groups, worked=True, slot=(7, 3)):
    for number, group in enumerate(groups):
        strike(run_dir, slot, group, number, worked=worked)
    return deaths_at(run_dir, slot)


def test_three_groups_make_a_slot_poison(tmp_path):
    assert not deaths_at(tmp_path, (7, 3)).poisoned(3)
    assert not strikes(tmp_path, [0, 1]).poisoned(8)
    assert strikes(tmp_path, [0, 1, 5]).poisoned(8)


def test_one_group_that_keeps_dying_is_its_own_trouble(tmp_path):
    assert not strikes(tmp_path, [2, 2, 2, 2]).poisoned(3)


def test_where_there_are_fewer_groups_fewer_must_agree(tmp_path):
    assert strikes(tmp_path, [0, 1, 0]).poisoned(2)
    assert not strikes(tmp_path / "two", [0, 1]).poisoned(2), "two deaths may be chance"
    assert strikes(tmp_path / "one", [0, 0, 0]).poisoned(1)


def test_workers_that_never_committed_a_step_name_no_slot(tmp_path):
    assert not strikes(tmp_path, [0, 1, 2], worked=False).poisoned(3)
    strike(tmp_path, (7, 3), 3, 9, worked=True)
    assert deaths_at(tmp_path, (7, 3)).poisoned(3)


def test_the_same_start_counts_once(tmp_path):
    for _ in range(3):
        strike(tmp_path, (7, 3), 1, 4, worked=True)
    assert deaths_at(tmp_path, (7, 3)).deaths == {1: 1}


def test_it_is_told_what_the_groups_ended_of(tmp_path):
    assert why_at(tmp_path, (7, 3)) == ""
    strike(tmp_path, (7, 3), 1, 0, worked=True)
    strike(tmp_path, (7, 3), 2, 0, worked=True, why="KeyError: 'x'")
    assert why_at(tmp_path, (7, 3)) == "KeyError: 'x'"


def test_one_of_all_tells(tmp_path):
    deaths = strikes(tmp_path, [0, 1, 2])
    assert [first_to_tell(tmp_path, (7, 3)) for _ in range(3)] == [True, False, False]
    assert deaths_at(tmp_path, (7, 3)) == deaths


def test_what_others_left_there_counts_for_nothing(tmp_path):
    strikes(tmp_path, [0, 1])
    folder = tmp_path / "state" / "struck"
    for name in ("x.1.worked", "9", "-3.1.worked", "4.1.worked.bak"):
        (folder / "7-3" / name).touch()
    assert deaths_at(tmp_path, (7, 3)).deaths == {0: 1, 1: 1}
