"""Each kind of fault of the network, and what the judge finds."""

import itertools
import random
from collections import Counter

import pytest

from hostile.hosts import KINDS, Groups, bound_s
from switch import NoNetworkError

BUSY_S = 10.0
"""What a busy machine may add to a pause. A fault that is not noticed takes much longer."""


@pytest.mark.timeout(10_000)
@pytest.mark.parametrize(("faults", "ranks", "lasts_s", "busy_s"), [
    (len(KINDS), 1, (0.3, 1.0), BUSY_S),
    pytest.param(1000, 1, (0.5, 5.0), 0.0, marks=pytest.mark.slow),
    pytest.param(200, 2, (0.5, 5.0), 0.0, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_hostile_network_costs_no_step_and_no_pause_is_above_its_bound(tmp_path, faults, ranks, lasts_s, busy_s):
    try:
        groups = Groups(tmp_path, 3, ranks)
    except NoNetworkError as error:
        pytest.skip(str(error))
    draw, longest, above = random.Random(faults), Counter(), []
    try:
        for name in itertools.islice(itertools.cycle(KINDS), faults):
            lasts = draw.uniform(*lasts_s)
            pause_s, bound = groups.suffer(KINDS[name](draw, groups.count), lasts), bound_s(name, lasts)
            longest[name] = max(longest[name], pause_s)
            if pause_s > bound + busy_s:
                above.append(f"{name}: {pause_s:.1f} s without a commit, {bound:.1f} s are its bound")
        wrong, aside = groups.judge()
    finally:
        groups.close()
    print(f"longest pauses: {dict(longest)}; {aside} commits that are not in the final history")
    assert (wrong, above) == ("", [])
