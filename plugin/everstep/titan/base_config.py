"""Finds the config that a file starts from: one of a registry of torchtitan, or torchtitan's defaults for a model."""

import importlib
import inspect
from types import ModuleType
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from everstep.config.assign import shown
from everstep.config.errors import nearest
from everstep.config.sections import Job
from everstep.config.source import Source
from everstep.titan import private
from everstep.titan.names import HuggingFaceTextDataLoader


def base_config(job: Job, source: Source) -> Trainer.Config:
    """Return the config that `[job]` names: `config` of the registry of `module`, with the model of `flavor`.

    If only `flavor` is set, every section around that model has torchtitan's defaults. A torchtitan 0.2 file without
    further keys meant the same.

    Raises:
        ConfigError: `[job]` names nothing, or the registry has no such config or flavor.
    """
    if not job.module:
        raise source.error(("job",), 'no base config: write [job] module = "llama3" and config = "llama3_debugmodel"')
    registry = _registry(job.module, source)
    if not job.config and not job.flavor:
        choices = ", ".join(_config_functions(registry))
        raise source.error(("job",), f"[job] needs config or flavor; {job.module} has the configs {choices}")
    config = _call_config(registry, job, source) if job.config else None
    if not job.flavor:
        assert config is not None
        return config
    spec = _model_spec(registry, job, source)
    if config is None:
        loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)))
        return Trainer.Config(
            model_spec=spec,
            loss=loss,
            optimizer=default_adamw(),
            dataloader=HuggingFaceTextDataLoader.Config(),
        )
    config.model_spec = spec
    for _, loss_config, _, _ in config.loss.traverse(CrossEntropyLoss.Config):
        assert isinstance(loss_config, CrossEntropyLoss.Config)
        if loss_config.global_vocab_size is not None:
            loss_config.global_vocab_size = decoder_vocab_size(spec)
    return config


GONE_MODELS = {
    "llama4": "torchtitan 0.3 has no llama4 any more; its mixture-of-experts models are deepseek_v3, gpt_oss and qwen3",
    "vlm": "torchtitan 0.3 has no vlm any more; its multimodal model is qwen3_5",
    "flux": "Everstep trains language models; flux makes images, and its trainer does not compute by slots",
    "transformers_modeling_backend": (
        'it is an experiment of torchtitan: write module = "torchtitan.experiments.transformers_modeling_backend"'
    ),
}
"""Model name in older files that is not accepted any more -> the explanation for the user."""


def _registry(module: str, source: Source) -> ModuleType:
    """Return the registry of a torchtitan model, given its short name, or of any package, given its import path."""
    place = ("job", "module")
    if module in GONE_MODELS:
        raise source.error(place, f'{source.name(place)} = "{module}": {GONE_MODELS[module]}')
    if module in private.models():
        names = [f"torchtitan.models.{module}.config_registry"]
    else:
        if not all(part.isidentifier() for part in module.split(".")):
            raise source.error(
                place, f"[job] module must be a model of torchtitan or an import path, got {shown(module)}"
            )
        names = [f"{module}.config_registry", module]
    for name in names:
        try:
            return importlib.import_module(name)
        except Exception as error:
            # A missing `name`, or a missing package above it, only means to try the next name. Any other error comes
            # from the registry itself, e.g. a library that it needs is missing.
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                raise source.error(place, f'[job] module = "{module}" cannot be imported: {error}') from error
    near = nearest(module, private.models())
    raise source.error(
        place,
        f'[job] module = "{module}" is neither a model of torchtitan nor a module that can be imported; '
        f'the nearest model is "{near}"',
    )


def _config_functions(registry: ModuleType) -> list[str]:
    """Return the names of the registry's functions that make a config. These are public and have no required arguments,
    and either the registry defines them or their annotation says that they return a config."""
    return [
        name
        for name, function in vars(registry).items()
        if inspect.isfunction(function)
        and (function.__module__ == registry.__name__ or "Config" in str(function.__annotations__.get("return")))
        and name[0].islower()
        and all(p.default is not p.empty for p in inspect.signature(function).parameters.values())
    ]


def _call_config(registry: ModuleType, job: Job, source: Source) -> Trainer.Config:
    functions = _config_functions(registry)
    place, named = ("job", "config"), f'[job] config = "{job.config}"'
    if job.config not in functions:
        near = nearest(job.config, functions)
        hint = f'the nearest is "{near}"' if near else "that registry has no configs"
        raise source.error(place, f"{named} is not in the registry of {job.module}; {hint}")
    try:
        config = getattr(registry, job.config)()
    except (ImportError, ValueError) as error:  # e.g. the config needs a library or device that this machine lacks
        raise source.error(place, f"{named} fails here: {error}") from error
    if not isinstance(config, Trainer.Config):
        raise source.error(place, f"{named} is not the config of a torchtitan Trainer")
    if config.model_spec is not None and config.model_spec.name in GONE_MODELS:
        raise source.error(place, f"{named}: {GONE_MODELS[config.model_spec.name]}")
    return config


def _model_spec(registry: ModuleType, job: Job, source: Source) -> Any:
    model_registry, place = getattr(registry, "model_registry", None), ("job", "flavor")
    if model_registry is None:
        raise source.error(place, f"[job] flavor: {job.module} has no model_registry")
    try:
        return model_registry(job.flavor)
    except KeyError:
        flavors = _flavors(model_registry)
        near = nearest(job.flavor, flavors)
        hint = f'; the nearest is "{near}" of {", ".join(map(shown, flavors))}' if near else ""
        raise source.error(place, f'[job] flavor = "{job.flavor}" is not a model of {job.module}{hint}') from None


def _flavors(model_registry: Any) -> list[str]:
    """Return the registry's flavors: the keys of the table of models in its module; [] unless there is exactly one."""
    module = inspect.getmodule(model_registry)
    tables = [table for name, table in vars(module).items() if name.endswith("_configs") and isinstance(table, dict)]
    return list(tables[0]) if len(tables) == 1 else []
