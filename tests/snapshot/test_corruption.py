"""Whatever happens to the files, no start restores a wrong state."""

import pytest

from corruption import NEW, OLD, fuzz


def test_corruptions_never_restore_a_wrong_state():
    cases = 300
    found = fuzz(cases, 0, groups=3)
    assert sum(found.values()) == cases
    assert found[NEW] > cases / 4, "decoded, if what is left suffices"
    assert found[OLD] > 0, "else the one before"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("cases", "seed", "shape"), [
    (10_000, 1, {"groups": 4}), (10_000, 2, {"groups": 5, "parity": 2}), (8_000, 3, {"groups": 3}),
    (8_000, 4, {"groups": 6, "parity": 2}), (5_000, 5, {"groups": 2}), (4_000, 6, {"groups": 8, "parity_group": 4}),
    (1_000, 8, {"groups": 3, "parity": 0}), (1_000, 9, {"groups": 3, "scale": 20}),
], ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "")  # fmt: skip
def test_fifty_thousand_corruptions_never_restore_a_wrong_state(cases, seed, shape):
    assert sum(fuzz(cases, seed, **shape).values()) == cases
