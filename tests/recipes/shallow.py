"""A registry of torchtitan's recipes with fewer layers, for `[job] module = "shallow"`: `suite__name`.

Pipelines keep their layers, which their stages need.
"""

from torchtitan.trainer import Trainer

import catalog

LAYERS = 2


def _shallow(suite, name):
    # a function, not a partial: registries hold functions
    def make() -> Trainer.Config:
        config = catalog.original(suite, name)
        model = config.model_spec.model
        if config.parallelism.pipeline_parallel_degree == 1 and hasattr(model, "layers"):
            model.layers = model.layers[:LAYERS]
        return config

    return make


globals().update({f"{suite}__{name}": _shallow(suite, name) for suite, name in catalog.names()})
