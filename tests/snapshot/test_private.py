"""The private name of torch that the room relies on is there and copies."""

import torch

from everstep.snapshot import private


def test_each_source_is_copied_to_its_target():
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.arange(3.0)]
    private.copy_each(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
