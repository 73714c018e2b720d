"""Runs in which slots are wrong or not finite: in one of two groups, in all, once only, in two of several groups."""

import math

import pytest

from everstep.report import score
from everstep.run.exits import UNFIT_EXIT
from everstep.step.holding import NOT_FINITE
from everstep.step.ledger import ASK_AFTER
from watched import LOSS_TOLERANCE, PATIENT, write_config

STEPS, GROUPS = 6, (0, 1)
FIRST, SLOT = 3, 0
"""As in `faulty_job`."""


@pytest.fixture
def with_fault(start, tmp_path, monkeypatch):
    """Runs a whole run with a fault of `faulty_job` to its good end, and returns it."""

    def _with_fault(fault, groups=2, share="", training=None, inject=None, **check):
        monkeypatch.setenv("EVERSTEP_TEST_FAULT", fault)
        monkeypatch.setenv("EVERSTEP_TEST_SHARE", share)
        config = write_config(
            tmp_path / f"{fault}-{groups}.toml", job={"module": "faulty_job", "config": "debugmodel"},
            training={"steps": STEPS, "global_batch_size": 4} | (training or {}), fault_tolerance=PATIENT,
            attention_check={"enable": True, "frequency": 1.0} | check, **{"attention_check.inject": inject or {}},
        )  # fmt: skip
        run = start(config, "--groups", str(groups))
        assert run.wait() == 0, run.console()
        return run

    return _with_fault


def refusals(run, group):
    return run.events("slot_refused", group=group, step=FIRST, slot=SLOT)


def same_losses(run, other):
    figures = score.score(run.run_dir, other.run_dir)
    assert figures["status"] == "done", figures["reason"]
    assert (figures["samples_lost"], figures["samples_repeated"]) == (0, 0)
    return figures["loss_delta_undefined"] == 0 and figures["loss_delta_max"] <= LOSS_TOLERANCE


def test_an_error_of_one_group_names_it_and_a_bound_that_all_leave_names_nobody(with_fault, monkeypatch):
    wrong = with_fault("kernel")
    assert len(refusals(wrong, 0)) == ASK_AFTER
    assert not refusals(wrong, 1)
    assert wrong.events("commit", step=FIRST)[0]["owners"][SLOT] == 1
    (unfit,) = wrong.events("unfit")
    assert (unfit["group"], unfit["step"], unfit["slot"]) == (0, FIRST, SLOT)
    assert "group 1 could compute it" in unfit["reason"]
    assert [set(event["exitcodes"].values()) for event in wrong.events("workers_died")] == [{UNFIT_EXIT}]
    assert not wrong.events("slot_accepted")
    (last,) = wrong.events("commit", step=STEPS)
    assert last["groups"] == [1]

    monkeypatch.setenv("EVERSTEP_TEST_SICK", "0,1")
    narrow = with_fault("bound")
    assert sum(len(refusals(narrow, group)) for group in GROUPS) == ASK_AFTER + 1
    steps = range(FIRST, STEPS + 1)
    assert [(event["step"], event["slot"]) for event in narrow.events("slot_accepted")] == [(s, SLOT) for s in steps]
    assert not narrow.events("unfit")
    assert not narrow.events("workers_died")
    assert all(narrow.events("commit", step=step)[0]["groups"] == [0, 1] for step in steps)
    assert same_losses(narrow, wrong)
    guarded, there = score.score(wrong.run_dir)["attention_coverage"].split(" of ")
    assert guarded == there > "0"


@pytest.mark.slow
def test_what_two_sick_groups_compute_is_never_committed(with_fault, monkeypatch):
    """A NaN with the check's default, or a wrong number at rate 1, in all slots that they compute or in half."""
    monkeypatch.setenv("EVERSTEP_TEST_SICK", "0,1")
    six_slots = {"global_batch_size": 6}
    clean = with_fault("none", training=six_slots)
    for groups, fault, share, frequency in (
        (3, "nan", "1.0", "adaptive"), (3, "kernel", "0.5", 1.0),
        (5, "nan", "0.5", "adaptive"), (5, "kernel", "1.0", 1.0),
    ):  # fmt: skip
        run = with_fault(fault, groups, share, six_slots, frequency=frequency)
        assert run.events("slot_refused")
        assert {event["group"] for kind in ("slot_refused", "unfit") for event in run.events(kind)} <= {0, 1}
        assert not run.events("slot_accepted")
        assert same_losses(run, clean)


def test_a_loss_that_is_not_finite_or_a_gradient_whose_norm_overflows_is_never_committed(with_fault):
    """With the check's default, which checks few calls."""
    training, inject = {"steps": 9, "global_batch_size": 7}, {"kind": "near-inf", "every": 4, "seed": 2}
    clean = with_fault("none", training=training, frequency="adaptive")
    hit = with_fault("loss", training=training, frequency="adaptive", inject=inject)
    assert all(math.isfinite(event["grad_norm"]) for event in hit.events("commit"))
    steps = {event["step"] for event in hit.events("slot_refused") if event["reason"] == NOT_FINITE}
    assert steps > {FIRST}, "nothing was hit, or it was harmless"
    assert same_losses(hit, clean)
    assert not hit.events("unfit")
