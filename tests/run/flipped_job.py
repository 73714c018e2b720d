"""A user's own module for `[job] module`: small_job's model whose feed-forward products are wrong on group GROUP, by
one bit of one element, from step FIRST on, if EVERSTEP_TEST_FLIP is set."""

import os
import sys

import torch

from everstep.titan.slots import Slots
from small_job import debugmodel

__all__ = ["debugmodel"]

GROUP, FIRST = "1", 3
FLIP = os.environ.get("EVERSTEP_TEST_FLIP", "")

_compute_slot = Slots.compute
_installed = False


def _flip(module, inputs, output):
    flipped = output.detach().clone()
    flipped.view(torch.int32).view(-1)[7] ^= 1 << 10
    return output + (flipped - output).detach()


def _compute_with_flips(slots, step, slot, *, whole):
    global _installed
    group = sys.argv[sys.argv.index("--fault_tolerance.group_id") + 1]
    # Workers that are started later are on another machine.
    if FLIP and step == FIRST and group == GROUP and not _installed:
        next(iter(slots._trainer.model_parts[0].layers.values())).feed_forward.register_forward_hook(_flip)
        _installed = True
    return _compute_slot(slots, step, slot, whole=whole)


Slots.compute = _compute_with_flips
