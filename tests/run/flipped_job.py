"""A user's own module for `[job] module`: small_job's model that computes wrongly on group GROUP, by one bit, from step
FIRST on, as EVERSTEP_TEST_FLIP says:

- "always": in a feed-forward product of every slot;
- a number: in that share of the slots, drawn each time; EVERSTEP_TEST_FLIPS names a file that tells of them;
- "weight": in one weight, flipped once.
"""

import os
import random
import sys
from pathlib import Path

import torch

from everstep.step.reduction import local
from everstep.titan.slots import Slots
from small_job import debugmodel

__all__ = ["debugmodel"]

GROUP, FIRST, BIT = "1", 3, 10
FLIP = os.environ.get("EVERSTEP_TEST_FLIP", "")
TOLD = os.environ.get("EVERSTEP_TEST_FLIPS", os.devnull)

_compute_slot = Slots.compute
_sick = _wrong = False


def _flip(module, inputs, output):
    if not _wrong:
        return output
    flipped = output.detach().clone()
    flipped.view(torch.int32).view(-1)[7] ^= 1 << BIT
    return output + (flipped - output).detach()


def _compute_with_flips(slots, step, slot, *, whole):
    global _sick, _wrong
    group = sys.argv[sys.argv.index("--fault_tolerance.group_id") + 1]
    product = next(iter(slots._trainer.model_parts[0].layers.values())).feed_forward
    # Workers that are started later are on another machine.
    if FLIP and step == FIRST and group == GROUP and not _sick:
        _sick = True
        product.register_forward_hook(_flip)
        if FLIP == "weight":
            local(next(product.parameters())).detach().view(torch.int32).view(-1)[7] ^= 1 << BIT
    _wrong = _sick and FLIP != "weight" and (FLIP == "always" or random.random() < float(FLIP))
    if _wrong:
        with Path(TOLD).open("a") as told:
            told.write(f"{step} {slot}\n")
    return _compute_slot(slots, step, slot, whole=whole)


Slots.compute = _compute_with_flips
