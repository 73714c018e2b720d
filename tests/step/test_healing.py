"""Groups that die while one heals: the long form of what tests/quorum/test_heal.py draws."""

import random

import pytest

from healing import Groups, disturbed


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_whoever_dies_while_a_group_heals_no_step_is_lost(tmp_path, context):
    groups = Groups(tmp_path, context, step_s=0.5, ballast=50_000_000, heal_bytes_per_s=33_000_000)
    try:
        for rank in groups.ranks.values():
            rank.first()
        draw = random.Random(0)
        for _ in range(100):
            disturbed(groups, draw, 4.0)
        groups.judge()
    finally:
        groups.run.close()
