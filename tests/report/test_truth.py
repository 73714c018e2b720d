"""The report against the truth of simulated runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.report.account import read
from everstep.report.faults import fault_rows
from everstep.report.groups import STATES
from everstep.report.score import figures_of, loss_by_step
from simulator import MOVES, Simulator

plays = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 11)), max_size=25)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32), plays)
def test_the_report_tells_the_truth_about_any_run(groups, slots, seed, moves):
    simulator = Simulator(groups, slots, seed)
    for move, which in moves:
        simulator.play(move, which)
    account, truth = read(simulator.events()), simulator.truth
    figures = figures_of(account)
    rows = fault_rows(account.faults.found, figures["step_s_median"])
    assert loss_by_step(account.lineage.final()) == truth.curve
    assert figures["attempts"] == truth.attempts
    assert figures["attempts_thrown_away"] == truth.thrown_away
    assert figures["slots_recomputed"] == truth.recomputed
    assert figures["kills"] == truth.kills
    assert figures["samples_lost"] == truth.samples("lost")
    assert figures["samples_repeated"] == truth.samples("repeated")
    rejoins = sorted(row["rejoin_s"] for row in rows if row["rejoin_s"] is not None)
    assert rejoins == pytest.approx(sorted(truth.rejoins)), "of each kill after which the group took part again"
    for row in rows:
        assert row["stall_s"] is None or 0 <= row["stall_s"] <= row["delay_s"]
    session = account.sessions[0]
    for group, one in account.current.groups.items():
        spent = figures["time_by_group"][str(group)]
        assert set(spent) == set(STATES)
        assert sum(spent.values()) == pytest.approx(one.at - session.begin), "no moment is left out or told twice"
    if figures["badput"]:
        assert figures["goodput"] + sum(figures["badput"].values()) == pytest.approx(1.0)
