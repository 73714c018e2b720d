"""Tests of the mutants: they are drawn from the protocol's code, and a seed shows a mutant that breaks a run."""

from dataclasses import replace

import pytest

from simulation import mutants


@pytest.mark.parametrize(("file", "old"), [
    ("quorum/gate.py", "self._counting().get("), ("wire/door.py", "not hello.startswith(MAGIC)"),
    ("step/ledger.py", "count < 1"),  # it accepts a missing slot
])  # fmt: skip
def test_the_code_between_groups_runs_in_the_simulation_as_it_is(file: str, old: str) -> None:
    every = mutants.drawn(10**9, 0, (file.partition("/")[0],))
    changed = next(mutant for mutant in every if mutant.file == file and mutant.old.startswith(old))
    assert mutants.attempt(changed, most=20), str(changed)


def test_a_mutant_that_only_learns_no_pace_is_caught_by_its_costs_and_unchanged_code_is_not() -> None:
    [changed] = [m for m in mutants.drawn(10**9, 0) if m.file == "step/median_time.py" and m.old == "max"]
    assert " of 15 seeds: " in mutants.attempt(changed, most=15)
    assert mutants.attempt(replace(changed, new=changed.old), most=5) == mutants.SAME
