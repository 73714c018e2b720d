"""Which slots are poison."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from everstep.launch.incarnation import Incarnation
from everstep.run.beats import Beat
from everstep.run.directory import groups_file
from everstep.run.files import write_json
from everstep.run.poison import poisoned, record_crash


def test_a_slot_is_poison_by_the_deaths_of_as_many_groups_as_the_run_has_now(tmp_path):
    for incarnation in range(3):
        record_crash(tmp_path, (6, 2), 0, incarnation, worked=True)
    for groups, found in ((1, [0, 0, 0]), (3, []), (1, [0, 0, 0])):
        write_json(groups_file(tmp_path), {"groups": groups})  # `everstep scale`
        assert poisoned(tmp_path, (6, 2)) == found


@pytest.mark.parametrize(("error", "on_poison", "to_blame"), [
    ("OSError: [Errno 116] Stale file handle", "stop", False),
    ("OSError: [Errno 116] Stale file handle", "skip", True),
    ("ValueError: a bad row", "stop", True),
])  # fmt: skip
def test_an_outage_of_the_datas_file_system_ends_no_run_as_if_a_slot_were_poison(tmp_path, error, on_poison, to_blame):
    write_json(groups_file(tmp_path), {"groups": 1})
    settings = SimpleNamespace(run_dir=tmp_path, group=0, fault_tolerance=SimpleNamespace(on_poison=on_poison))
    death = SimpleNamespace(by_itself=True, exitcode=1, committed=True, error=error)
    for number in range(3):
        one = SimpleNamespace(settings=settings, number=number, _beat_of=lambda _: Beat(2, 0.0, 6, "compute", 2))
        found = Incarnation.poison_of(one, None, death, Mock())
    assert found == (((6, 2), [0, 0, 0]) if to_blame else None)
