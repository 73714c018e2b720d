"""Fields of a tally are read as they were written, and the sum of two is the tally of both."""

import pytest
import torch

from everstep.titan.tally import Layout, StepSums


def test_what_is_packed_and_summed_comes_apart_by_name():
    layout = Layout(StepSums, 3, 0, 2)
    mine = StepSums(loads=torch.tensor([1, 2, 3]), reached=torch.zeros(0), words=torch.tensor([2.0**52, 0.0]))
    theirs = StepSums(loads=torch.ones(3), reached=torch.zeros(0), words=torch.tensor([0.0, 7.0]))
    both = layout.unpack(layout.pack(mine) + layout.pack(theirs))
    assert (both.loads.tolist(), both.reached.tolist(), both.words.tolist()) == ([2, 3, 4], [], [2.0**52, 7])
    with pytest.raises(ValueError, match=r"StepSums of \[3, 1, 2\] and not \[3, 0, 2\]"):
        layout.pack(StepSums(loads=torch.ones(3), reached=torch.zeros(1), words=torch.ones(2)))
