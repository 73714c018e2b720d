"""Which slots are poison."""

from everstep.run.directory import groups_file
from everstep.run.files import write_json
from everstep.run.poison import poisoned, record_crash


def test_a_slot_is_poison_by_the_deaths_of_as_many_groups_as_the_run_has_now(tmp_path):
    for incarnation in range(3):
        record_crash(tmp_path, (6, 2), 0, incarnation, worked=True)
    for groups, found in ((1, [0, 0, 0]), (3, []), (1, [0, 0, 0])):
        write_json(groups_file(tmp_path), {"groups": groups})  # `everstep scale`
        assert poisoned(tmp_path, (6, 2)) == found
