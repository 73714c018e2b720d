"""The short form of `scripts/hostile`: each kind of fault once, and what the judge finds."""

import random

import pytest

from hostile.__main__ import KINDS, Groups, trials
from switch import NoNetworkError

BUSY_S = 10.0
"""What a busy machine may add to a pause. A fault that is not noticed takes much longer."""


@pytest.mark.timeout(300)
def test_a_hostile_network_costs_no_step_and_no_pause_is_above_its_bound(tmp_path, context):
    try:
        groups = Groups(context, tmp_path, 3, 1)
    except NoNetworkError as error:
        pytest.skip(str(error))
    try:
        for name, pause_s, over_s in trials(groups, random.Random(1), len(KINDS), list(KINDS), (0.3, 1.0)):
            assert over_s <= BUSY_S, f"{name}: {pause_s:.1f} s without a commit"
        assert groups.judge()[0] == ""
    finally:
        groups.close()
