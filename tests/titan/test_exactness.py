"""What `exact = true` asks of a group: the fingerprint of the run."""

import pytest

from everstep.run.exits import UNFIT_EXIT, TrainerEnds
from everstep.run.files import read_json
from everstep.titan import exactness


def test_a_group_that_computes_other_bits_ends_with_a_sentence(tmp_path):
    first = {"torch": "2.15", "threads": "1", "computation": "c0ffee"}
    exactness.require_same(tmp_path, first)
    exactness.require_same(tmp_path, dict(first))
    with pytest.raises(TrainerEnds, match=r"threads is 2 here and 1 there\. Give it the same") as ends:
        exactness.require_same(tmp_path, first | {"threads": "2"})
    assert ends.value.status == UNFIT_EXIT
    with pytest.raises(TrainerEnds, match="instructions is AVX2 here and not set there"):
        exactness.require_same(tmp_path, first | {"instructions": "AVX2"})
    assert read_json(tmp_path / "state" / "exact.json") == first, "the first start counts"
