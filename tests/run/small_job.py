"""A user's own module for `[job] module`: torchtitan's debug Llama 3 with two layers. Most tests of runs train it."""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

LAYERS = 2


def debugmodel() -> Trainer.Config:
    config = llama3_debugmodel()
    assert config.model_spec is not None
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    return config
