"""The score against the truth of simulated runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.report.faults import collect_faults, presences, rejoin_s
from everstep.report.score import measure
from simulator import MOVES, Simulator

plays = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 11)), max_size=25)


def simulated(groups, slots, seed, moves):
    simulator = Simulator(groups, slots, seed)
    for move, which in moves:
        simulator.play(move, which)
    return simulator.events(), simulator.truth


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32), plays)
def test_the_score_tells_the_truth_about_any_run(groups, slots, seed, moves):
    events, truth = simulated(groups, slots, seed, moves)
    found = measure(events)
    figures, losses = found.figures, found.losses
    assert losses == truth.curve
    assert figures["attempts"] == truth.attempts
    assert figures["attempts_thrown_away"] == truth.thrown_away
    assert figures["slots_recomputed"] == truth.recomputed
    assert figures["kills"] == truth.kills
    assert figures["samples_lost"] == truth.samples("lost")
    assert figures["samples_repeated"] == truth.samples("repeated")


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32), plays)
def test_every_kill_after_which_the_group_took_part_again_has_its_rejoin(groups, slots, seed, moves):
    events, truth = simulated(groups, slots, seed, moves)
    faults, present = collect_faults(events), presences(events)
    measured = [rejoin_s(fault, group, faults, present.get(group)) for fault in faults for group in fault.groups]
    assert sorted(back for back in measured if back is not None) == pytest.approx(sorted(truth.rejoins))
