"""A user's module for `[job] module`: small_job's model with dropout, one weight for embedding and output, and a frozen
attention in the first layer. `undetermined` has an operator that PyTorch cannot compute deterministically."""

import torch
import torch.nn.functional as F
from torchtitan.models.llama3.model import Llama3Model

import small_job

_make = Llama3Model.__init__


def _make_frozen(model, config):
    _make(model, config)
    model.layers["0"].attention.requires_grad_(False)
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: F.dropout(output, 0.1))


Llama3Model.__init__ = _make_frozen


def debugmodel():
    config = small_job.debugmodel()
    config.model_spec.model.enable_weight_tying = True
    return config


def undetermined():
    def forward(model, *args, **kwargs):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
        return _forward(model, *args, **kwargs)

    _forward, Llama3Model.forward = Llama3Model.forward, forward
    return small_job.debugmodel()
