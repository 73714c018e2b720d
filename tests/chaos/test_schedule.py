"""When faults are due, and that a seed repeats them."""

import random

import pytest

from everstep.chaos.campaign import read_campaign
from everstep.chaos.kinds import KillGroup, KillLighthouse, KillWorker, StopWorker
from everstep.chaos.schedule import Schedule
from everstep.chaos.target import LocalTarget
from everstep.run.directory import LaunchError


@pytest.fixture
def target(told):
    """A target whose run can be told of, and that no test strikes."""
    run = told(3)
    target = LocalTarget(run.view)
    target.told = run
    return target


def names(schedule, target, times):
    return [due[0].name for now in times if (due := schedule.due(target, float(now))) is not None]


def test_the_clock_starts_with_the_first_step_and_a_fault_that_had_to_wait_does_not_bring_the_next_one_closer(target):
    schedule = Schedule([StopWorker(at_step=1)], 0, 10.0, [KillGroup()])
    assert names(schedule, target, (0, 50)) == []
    target.told.take_part(0)
    assert names(schedule, target, (100, 109.9, 110, 135)) == [], "nobody else holds the state"
    target.told.take_part(0, 1, 2)
    assert names(schedule, target, (136, 136, 145.9)) == ["stop-worker", "kill-group"]
    assert names(schedule, target, (146,)) == ["kill-group"]
    assert not schedule.finished()


def test_a_kind_that_cannot_be_done_holds_nobody_up(target):
    target.told.take_part(0, 1, 2)
    drawn = names(Schedule((), 0, 1.0, [KillLighthouse(), KillGroup()]), target, range(5))
    assert drawn == ["kill-group"] * 4, "there is no lighthouse"
    target.told.tell("lighthouse_started", pid=3)
    assert "kill-lighthouse" in names(Schedule((), 0, 1.0, [KillLighthouse(), KillGroup()]), target, range(4))


def test_a_seed_repeats_kinds_and_victims(target):
    target.told.take_part(0, 1, 2)

    def played(seed):
        schedule = Schedule((), seed, 2.0, [KillGroup(), KillGroup(count=2), KillWorker()])
        dues = [(now, due) for now in range(60) if (due := schedule.due(target, float(now))) is not None]
        return [(now, fault.name, fault.plan(target, choose).target_group) for now, (fault, choose) in dues]

    assert played(1) == played(1)
    assert played(1) != played(2)


def test_entries_come_at_their_step_or_time_and_only_once(target):
    schedule = Schedule([KillGroup(at_step=5), StopWorker(at_s=3.0)])
    target.told.take_part(0, 1, 2, step=4)
    begin = target.run.first_commit
    assert names(schedule, target, (begin, begin + 2.9)) == []
    assert names(schedule, target, (begin + 3.0, begin + 3.0)) == ["stop-worker"]
    target.told.take_part(0, 1, 2, step=7)
    assert names(schedule, target, (begin + 4.0, begin + 4.0)) == ["kill-group"]
    assert schedule.finished()
    assert schedule.unmet() == []


def test_an_entry_that_cannot_be_done_waits_then_is_named_with_the_reason(target):
    schedule = Schedule([KillGroup(at_step=1, patience_s=10.0), StopWorker(at_step=99)])
    target.told.take_part(0)
    assert names(schedule, target, (100, 109, 111)) == []
    assert schedule.unmet() == [
        "kill-group at step 1 could not be done within 10 s: 0 groups take part that may be hit.",
        "stop-worker at step 99 did not come up.",
    ]


def test_each_entry_draws_for_itself_and_what_waits_changes_nothing_for_the_others(target):
    target.told.take_part(0, 1, 2)

    def drawn(*before):
        schedule = Schedule([*before, *(KillWorker(at_step=1) for _ in range(4))], seed=5)
        dues = [schedule.due(target, 0.0) for _ in range(5)]
        return [due[1].random() for due in dues if due and due[0].name == "kill-worker"]

    assert len(set(drawn())) == 4
    assert drawn(KillGroup(at_step=99)) == drawn(KillGroup(at_step=1))


CAMPAIGN = """
seed = 7
spare_groups = [0]
[[fault]]
name = "stop-worker"
at_step = 12
duration_s = 3
[[fault]]
name = "kill-worker"
at_s = 4
group = 1
rank = 0
"""


def test_a_campaign_file_says_which_when_and_how(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(CAMPAIGN)
    campaign = read_campaign(path)
    assert (campaign.seed, campaign.spare_groups) == (7, [0])
    stop, kill = campaign.faults
    assert (stop.name, stop.at_step, stop.duration_s) == ("stop-worker", 12, 3)
    assert (kill.name, kill.at_s, kill.group, kill.rank) == ("kill-worker", 4, 1, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no fault"),
        ("sed = 1\nfault = []", "unknown key 'sed'"),
        ("fault = 'x'", "fault should be"),
        ("[[fault]]\nat_step = 1", "there is no fault , did you mean"),
        ("[[fault]]\nname = 'kill-grup'\nat_step = 1", "did you mean kill-group?"),
        ("[[fault]]\nname = 'kill-all'", "fault 1 (kill-all): give either at_step or at_s"),
        ("[[fault]]\nname = 'kill-all'\nat_step = 1\nat_s = 1", "give either at_step or at_s"),
        ("[[fault]]\nname = 'kill-all'\nat_step = '1'", "fault 1 (kill-all).at_step should be"),
        ("[[fault]]\nname = 'kill-all'\nat_step = 1\ndurations = 4", "fault 1 (kill-all) has the unknown key"),
        ("[[fault]]\nname = 'kill-all'\nat_step = 1\ngroup = true", "fault 1 (kill-all).group should be"),
        ("every = ", "not valid TOML"),
    ],
)
def test_a_campaign_file_that_makes_no_sense_is_refused_with_the_place(tmp_path, text, says):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(LaunchError) as refused:
        read_campaign(path)
    assert says in str(refused.value)


def test_victims_are_drawn_from_all_that_may_be_hit(target):
    target.told.take_part(0, 1, 2)
    choose = random.Random(0)
    assert {KillGroup().plan(target, choose).target_group for _ in range(50)} == {0, 1, 2}
    assert {tuple(KillGroup(count=2).plan(target, choose).target_group) for _ in range(50)} == {(0, 1), (0, 2), (1, 2)}
