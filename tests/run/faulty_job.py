"""A user's module for `[job] module`: small_job's model, which the groups of EVERSTEP_TEST_SICK compute wrongly from
step FIRST on, in slot SLOT or in a random share EVERSTEP_TEST_SHARE of all slots. EVERSTEP_TEST_FAULT is the fault:

    kernel    the matrix product of the output projection is wrong
    nan       likewise, by a NaN
    loss      the loss of one slot is a NaN, once
    bound     each projection's round-off is 2.5 times its bound
    flip      a bit of a feed-forward product is flipped
    weight    a bit of one weight is flipped, once
    sum       a bit of one gradient that is summed over all groups is flipped, once
"""

import math
import os
import random
import sys

import torch

from everstep.attention import product
from everstep.attention.findings import Deviation
from everstep.step.private import local
from everstep.step.reduction import GradientReducer
from everstep.titan.slot_computer import SlotComputer
from small_job import DIM, debugmodel

__all__ = ["debugmodel"]

SLOT, FIRST, BIT, SUM_BIT = 0, 3, 10, 45
FAULT, SHARE = os.environ.get("EVERSTEP_TEST_FAULT", ""), os.environ.get("EVERSTEP_TEST_SHARE", "")
SICK = os.environ.get("EVERSTEP_TEST_SICK", "0").split(",")

_compute_slot, _finish_sums, _row_deviation = SlotComputer.compute, GradientReducer.finish, product.row_deviation
_due = _installed = _flips_sum = False
_library = torch.library.Library("aten", "IMPL")


def _wrong_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.bmm(a[None], b[None])[0]
    if _due and b.shape == (DIM, DIM):
        y[0, 0] += math.nan if FAULT == "nan" else 8 * y.std()
    return y


def _too_narrow(*args) -> Deviation:
    seen = _row_deviation(*args)
    return Deviation(seen.residual, seen.residual.abs().amax() / 2.5) if _due else seen


def _flip(module, inputs, output):
    if not _due:
        return output
    flipped = output.detach().clone()
    flipped.view(torch.int32).view(-1)[7] ^= 1 << BIT
    return output + (flipped - output).detach()


def _install(slots):
    global _flips_sum
    feed_forward = next(iter(slots._trainer.model_parts[0].layers.values())).feed_forward
    match FAULT:
        case "kernel" | "nan":
            _library.impl("mm", _wrong_product, "CPU")
        case "bound":
            product.row_deviation = _too_narrow
        case "flip":
            feed_forward.register_forward_hook(_flip)
        case "weight":
            local(next(feed_forward.parameters())).detach().view(torch.int32).view(-1)[7] ^= 1 << BIT
        case "sum":
            _flips_sum = True


def _compute_with_faults(slots, step, slot, *, check_all):
    global _due, _installed
    group = sys.argv[sys.argv.index("--fault_tolerance.group_id") + 1]
    first = step == FIRST and group in SICK and not _installed
    if first:  # later starts count as on another machine, without faults
        _install(slots)
        _installed = True
    _due = _installed and (random.SystemRandom().random() < float(SHARE) if SHARE else slot == SLOT)
    try:
        _compute_slot(slots, step, slot, check_all=check_all)
    finally:
        _due = False
    if first and FAULT == "loss":
        slots._losses[slot].fill_(math.nan)


def _finish_with_flip(reducer):
    global _flips_sum
    _finish_sums(reducer)
    if _flips_sum:
        _flips_sum = False
        reducer._buckets[0].memory.flat.view(torch.int64)[7] ^= 1 << SUM_BIT


SlotComputer.compute, GradientReducer.finish = _compute_with_faults, _finish_with_flip
