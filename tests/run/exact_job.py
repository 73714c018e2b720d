"""A user's own module for `[job] module`: small_job's model whose embedding is also its output, and whose first layer's
attention is frozen."""

from torchtitan.models.llama3.model import Llama3Model

import small_job

_make = Llama3Model.__init__


def _make_frozen(model, config):
    _make(model, config)
    model.layers["0"].attention.requires_grad_(False)


Llama3Model.__init__ = _make_frozen


def debugmodel():
    config = small_job.debugmodel()
    config.model_spec.model.enable_weight_tying = True
    return config
