"""Runs of two groups in which one slot is refused again and again: by one group, or by all."""

import pytest

from everstep.attention.evidence import ATTEMPTS
from everstep.report import score
from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT
from everstep.step.ledger import WITNESS_AFTER
from watched import assert_nothing_lost, write_config

STEPS, GROUPS = 6, (0, 1)
FIRST, SLOT = 3, 0
"""Of `faulty_job`."""
DEADLINE_S = 900.0


def test_a_group_is_asked_for_after_as_many_refusals_as_a_witness_is_heard_after():
    assert ATTEMPTS == WITNESS_AFTER


@pytest.fixture
def with_fault(start, tmp_path, monkeypatch):
    """A run of two groups that meets a fault of `faulty_job`, from its begin to its end."""

    def _with_fault(fault):
        monkeypatch.setenv("EVERSTEP_TEST_FAULT", fault)
        config = write_config(
            tmp_path / f"{fault}.toml",
            job={"module": "faulty_job", "config": "debugmodel"},
            training={"steps": STEPS, "global_batch_size": 4},
            attention_check={"enable": True, "frequency": 1.0},
            fault_tolerance={
                "stall_timeout_s": 300.0,
                "startup_timeout_s": 900.0,
                "reduce_timeout_s": 60.0,
                "quorum_timeout_s": 90.0,
            },
        )
        run = start(config, "--groups", "2")
        run.status = run.wait(DEADLINE_S)
        return run

    return _with_fault


def refusals(run, group, step=FIRST):
    return [
        event for event in run.events("slot_refused", group=group) if (event["step"], event["slot"]) == (step, SLOT)
    ]


def owner(run, step):
    (told,) = {tuple(event["owners"]) for event in run.events("commit", step=step)}
    return told[SLOT]


def test_an_error_of_one_group_names_it_and_a_bound_that_all_leave_names_nobody(with_fault):
    """The two runs have the same losses."""
    wrong = with_fault("kernel")
    assert wrong.status == 0, wrong.said()
    assert len(refusals(wrong, 0)) == ATTEMPTS
    assert not refusals(wrong, 1)
    assert owner(wrong, FIRST) == 1
    (unfit,) = wrong.events("unfit")
    assert (unfit["group"], unfit["step"], unfit["slot"], unfit["witnesses"]) == (0, FIRST, SLOT, 1)
    assert "Another group computed the slot and saw none of it" in unfit["reason"]
    assert [set(event["exitcodes"].values()) for event in wrong.events("workers_died")] == [{UNFIT_EXIT}]
    assert not wrong.events("bound_suspect")
    (last,) = wrong.events("commit", step=STEPS)
    assert last["groups"] == [1]

    narrow = with_fault("bound")
    assert narrow.status == 0, narrow.said()
    assert [len(refusals(narrow, group)) for group in GROUPS] == [ATTEMPTS, 1]
    suspects = narrow.events("bound_suspect")
    assert {(event["group"], event["step"], event["slot"], event["witnesses"]) for event in suspects} == {
        (group, FIRST, SLOT, 1) for group in GROUPS
    }
    assert not narrow.events("unfit")
    assert not narrow.events("workers_died")
    for step in range(FIRST + 1, STEPS + 1):
        assert not [refusals(narrow, group, step) for group in GROUPS if refusals(narrow, group, step)]
        assert narrow.events("commit", step=step)[0]["groups"] == [0, 1]
    assert_nothing_lost(narrow.run_dir, wrong.run_dir, STEPS)
    figures = score.score(wrong.run_dir)
    assert (figures["samples_lost"], figures["samples_repeated"], figures["attempts_thrown_away"]) == (0, 0, 0)
    guarded, there = figures["attention_coverage"].split(" of ")
    assert guarded == there > "0"
    told = [score.score(run.run_dir) for run in (wrong, narrow)]
    assert [(figures["ranks_unfit"], figures["bounds_widened"] > 0) for figures in told] == [(1, False), (0, True)]


@pytest.mark.slow
def test_numbers_that_are_not_finite_anywhere_send_no_group_away(with_fault):
    """Training diverges, and says so, as it does without the check."""
    run = with_fault("data")
    assert run.status != 0
    assert not run.events("unfit")
    assert {event["group"] for event in run.events("not_finite")} == {0, 1}
    assert {event["step"] for event in run.events("diverged")} == {FIRST}
    died = [code for event in run.events("workers_died") for code in event["exitcodes"].values()]
    assert set(died) == {HOPELESS_EXIT}
