"""Everything dies again and again: what is resumed is bit for bit a committed step, and never behind the newest one
that was said to be protected."""

import pytest

from chain import Chain


@pytest.mark.parametrize(
    ("seed", "deaths"), [(0, 5), *(pytest.param(seed, 100, marks=pytest.mark.slow) for seed in range(1, 11))]
)
@pytest.mark.timeout(3600)
def test_death_after_death_nothing_that_was_said_to_be_protected_is_lost(seed, deaths):
    chain = Chain(seed)
    chain.run(deaths)
    assert sum(chain.lost.values()) == deaths
