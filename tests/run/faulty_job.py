"""A user's own module for `[job] module`: torchtitan's debug Llama 3 whose attention meets a fault in slot SLOT, or in
a share of all slots, EVERSTEP_TEST_SHARE, each time it is computed from step FIRST on: by EVERSTEP_TEST_FAULT,

    kernel    the groups of EVERSTEP_TEST_SICK multiply matrices wrongly where the output projection is
    nan       likewise, by a NaN
    bound     on every group each projection's round-off is 2.5 times its bound
"""

import math
import os
import random
import sys

import torch
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from everstep.attention import product
from everstep.attention.findings import Deviation
from everstep.titan.slots import Slots

SLOT, FIRST = 0, 3
FAULT, SHARE = os.environ.get("EVERSTEP_TEST_FAULT", ""), os.environ.get("EVERSTEP_TEST_SHARE", "")
SICK = os.environ.get("EVERSTEP_TEST_SICK", "0").split(",")

_compute_slot, _row_deviation = Slots.compute, product.row_deviation
_due = _installed = False
_library = torch.library.Library("aten", "IMPL")


def _wrong_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.bmm(a[None], b[None])[0]
    if _due and b.shape == (256, 256):
        y[0, 0] += math.nan if FAULT == "nan" else 8 * y.std()
    return y


def _too_narrow(*args) -> Deviation:
    seen = _row_deviation(*args)
    return Deviation(seen.residual, seen.residual.abs().amax() / 2.5) if _due else seen


def _install():
    group = sys.argv[sys.argv.index("--fault_tolerance.group_id") + 1]
    if FAULT in ("kernel", "nan") and group in SICK:
        _library.impl("mm", _wrong_product, "CPU")
    elif FAULT == "bound":
        product.row_deviation = _too_narrow


def _compute_with_faults(slots, step, slot, *, whole):
    global _due, _installed
    if step == FIRST and not _installed:  # workers that are started later are on another machine
        _install()
        _installed = True
    _due = step >= FIRST and (random.SystemRandom().random() < float(SHARE) if SHARE else slot == SLOT)
    try:
        return _compute_slot(slots, step, slot, whole=whole)
    finally:
        _due = False


Slots.compute = _compute_with_faults


def debugmodel() -> Trainer.Config:
    return llama3_debugmodel()
