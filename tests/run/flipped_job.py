"""A user's own module for `[job] module`: small_job's model that computes wrongly on group GROUP, by one bit, from step
FIRST on, as EVERSTEP_TEST_FLIP says:

- "always": in a feed-forward product of every slot;
- a number: in that share of the slots, drawn each time; EVERSTEP_TEST_FLIPS names a file that tells of them;
- "weight": in one weight, flipped once;
- "sum": in one gradient, summed over all groups, once.
"""

import os
import random
import sys
from pathlib import Path

import torch

from everstep.step.reduction import GradientReducer, local
from everstep.titan.slots import Slots
from small_job import debugmodel

__all__ = ["debugmodel"]

GROUP, FIRST, BIT = "1", 3, 10
SUM_BIT = 45
FLIP = os.environ.get("EVERSTEP_TEST_FLIP", "")
TOLD = os.environ.get("EVERSTEP_TEST_FLIPS", os.devnull)

_compute_slot, _finish_sums = Slots.compute, GradientReducer.finish
_sick = _wrong = _flips_sum = False


def _flip(module, inputs, output):
    if not _wrong:
        return output
    flipped = output.detach().clone()
    flipped.view(torch.int32).view(-1)[7] ^= 1 << BIT
    return output + (flipped - output).detach()


def _compute_with_flips(slots, step, slot, *, whole):
    global _sick, _wrong, _flips_sum
    group = sys.argv[sys.argv.index("--fault_tolerance.group_id") + 1]
    product = next(iter(slots._trainer.model_parts[0].layers.values())).feed_forward
    # Workers that are started later are on another machine.
    if FLIP and step == FIRST and group == GROUP and not _sick:
        _sick = True
        product.register_forward_hook(_flip)
        if FLIP == "weight":
            local(next(product.parameters())).detach().view(torch.int32).view(-1)[7] ^= 1 << BIT
        _flips_sum = FLIP == "sum"
    _wrong = _sick and FLIP not in ("weight", "sum") and (FLIP == "always" or random.random() < float(FLIP))
    if _wrong:
        with Path(TOLD).open("a") as told:
            told.write(f"{step} {slot}\n")
    return _compute_slot(slots, step, slot, whole=whole)


def _finish_with_flip(reducer):
    global _flips_sum
    _finish_sums(reducer)
    if _flips_sum:
        _flips_sum = False
        reducer._buckets[0].memory.flat.view(torch.int64)[7] ^= 1 << SUM_BIT


Slots.compute, GradientReducer.finish = _compute_with_flips, _finish_with_flip
