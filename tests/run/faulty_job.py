"""A user's own module for `[job] module`: torchtitan's debug Llama 3 whose attention meets a fault in one slot, each
time it is computed from step FIRST on: by EVERSTEP_TEST_FAULT,

    kernel    group GROUP's kernel for matrix products is wrong where the output projection is multiplied
    bound     on every group each projection's round-off is 2.5 times its bound
"""

import os
import sys

import torch
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from everstep.attention import product
from everstep.attention.findings import Deviation
from everstep.titan.slots import Slots

GROUP, SLOT, FIRST = "0", 0, 3
FAULT = os.environ.get("EVERSTEP_TEST_FAULT", "")

_compute_slot, _row_deviation = Slots.compute, product.row_deviation
_due = _installed = False
_library = torch.library.Library("aten", "IMPL")


def _wrong_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.bmm(a[None], b[None])[0]
    if _due and b.shape == (256, 256):
        y[0, 0] += 8 * y.std()
    return y


def _too_narrow(*args) -> Deviation:
    seen = _row_deviation(*args)
    return Deviation(seen.residual, seen.residual.abs().amax() / 2.5) if _due else seen


def _install():
    group = sys.argv[sys.argv.index("--fault_tolerance.group_id") + 1]
    if FAULT == "kernel" and group == GROUP:
        _library.impl("mm", _wrong_product, "CPU")
    elif FAULT == "bound":
        product.row_deviation = _too_narrow


def _compute_with_faults(slots, step, slot, *, whole):
    global _due, _installed
    if step == FIRST and not _installed:  # workers that are started later are on another machine
        _install()
        _installed = True
    _due = step >= FIRST and slot == SLOT
    try:
        return _compute_slot(slots, step, slot, whole=whole)
    finally:
        _due = False


Slots.compute = _compute_with_faults


def debugmodel() -> Trainer.Config:
    return llama3_debugmodel()
