"""What a config needs of the machine: a GPU, which is checked before the start, an attention that runs, and memory."""

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.override import apply_overrides
from torchtitan.models.common import dist_gemm, token_dispatcher

from everstep.config.assign import shown
from everstep.config.checks import Problem
from everstep.titan import attention, cpu, cpu_attention, private

_KERNELS = {
    "torchtitan.overrides.fused_swiglu": "Triton",
    "torchtitan.overrides.fused_mla": "Triton",
    "torchtitan.overrides.helion_rope": "Helion",
}
"""Override of torchtitan that is a kernel for GPUs -> the language of the kernel."""

_MODULES = {
    token_dispatcher.DeepEPTokenDispatcher.Config: "which writes to other GPUs' memory",
    token_dispatcher.HybridEPTokenDispatcher.Config: "which writes to other GPUs' memory",
    token_dispatcher.MinimalAsyncEPTokenDispatcher.Config: "which writes to other GPUs' memory",
    dist_gemm.AllGatherFusedQKVLinear.Config: "a product that is fused with its communication",
}
"""Module of torchtitan's models that needs a GPU, by its Config -> what it does, for messages."""


def needs_gpu(config: Any) -> Iterator[Problem]:
    """Yield a problem for each setting of a trainer config that needs a GPU."""
    for item in config.override.imports:
        if kernel := _kernel(item):
            yield _problem(
                "override", "imports", item if isinstance(item, str) else item[0], f"it is a {kernel} kernel"
            )
    if config.optimizer.implementation == "fused_opt_states_bf16":
        why = "its kernel for states in bfloat16 beside parameters in float32 runs on GPUs only"
        yield _problem("optimizer", "implementation", config.optimizer.implementation, why)
    if any(group.optimizer_name == "DistMuon" for group in config.optimizer.param_groups):
        yield _problem("optimizer", "param_groups", "DistMuon", "its processes exchange parameters between GPUs")
    if config.compile.enable and config.compile.enable_async_tensor_parallel:
        yield _problem("compile", "enable_async_tensor_parallel", True, "it writes to other GPUs' symmetric memory")
    if config.parallelism.enable_fsdp_symm_mem:
        yield _problem("parallelism", "enable_fsdp_symm_mem", True, "only GPUs have symmetric memory")
    if config.checkpoint.enable and getattr(config.checkpoint, "async_mode", "") == "async_with_pinned_mem":
        yield _problem("checkpoint", "async_mode", "async_with_pinned_mem", "it copies from a GPU's memory")
    model = config.model_spec.model
    for kind, what in _MODULES.items():
        if next(iter(model.traverse(kind)), None):
            name = kind.__qualname__.partition(".")[0]
            yield Problem(("job", "config"), f"has {name}, {what}: it needs a GPU, and there is none here")


def _kernel(item: Any) -> str:
    """Return the language of the GPU kernel that an override puts into the model; "" if it is none of `_KERNELS`."""
    name = item if isinstance(item, str) else item[0]
    return _KERNELS.get(name.rpartition(".")[0], "")


def choose_attention(config: Any) -> None:
    """Give a trainer config's model, in place, an attention that runs on this machine, with checks if they are enabled.

    Raises:
        ValueError: the model's attention cannot be checked.
    """
    if not cpu.has_attention_kernels():
        cpu_attention.prepare(config)
    attention.apply(config, config.attention_check)


def why_not_built(config: Any) -> str:
    """Return why the model of a trainer config cannot be built with its checks and overrides, or its optimizer for it;
    "" if no reason is found. Does not change the config."""
    copy = deepcopy(config)
    try:
        copy.model_spec.model.update_from_config(config=copy)
        if not cpu.has_accelerator():  # on a login node, the kernel's language may not be installed
            copy.override.imports = [item for item in copy.override.imports if not _kernel(item)]
        apply_overrides(copy.override, copy)
        choose_attention(copy)
        stages = private.stages(copy)
    except (ValueError, ImportError, TypeError, NotImplementedError) as error:
        return str(error)
    if config.compile.enable and config.compile.backend not in torch.compiler.list_backends(()):
        known = ", ".join(torch.compiler.list_backends())
        return f'[compile] backend = "{config.compile.backend}" is none of {known}'
    return _why_no_optimizer(copy, stages)


def _why_no_optimizer(config: Any, stages: list[list[str]]) -> str:
    """Return why torchtitan's optimizer cannot be built for the config's model, once that is updated and overridden, or
    for a pipeline stage of it."""
    names = {group.optimizer_name for group in config.optimizer.param_groups}
    if type(config.optimizer) is not OptimizersContainer.Config or "DistMuon" in names:
        return ""  # it may need the group's other processes
    try:
        with torch.device("meta"):
            model = config.model_spec.model.build()
            optimizers = config.optimizer.build(model_parts=[model])
    except ImportError:
        return ""  # of a kernel, which a login node need not have
    except (ValueError, NotImplementedError, AssertionError) as error:
        return f"[optimizer] {error}"
    except re.error as error:
        return f'[optimizer] pattern = "{error.pattern}": {error}'
    for stage in stages:
        left = {name for name, param in model.named_parameters() if param.requires_grad and _is_in(name, stage)}
        for group in config.optimizer.param_groups:
            found = {name for name in left if re.search(group.pattern, name)}
            if not found:
                where = f"the pipeline stage with {', '.join(stage)}: torchtitan needs one in each stage"
                return f'[optimizer] pattern = "{group.pattern}" matches no parameter of {where}'
            left -= found
    unknown = {key for one in optimizers for group in one.param_groups for key in group.keys() - one.defaults.keys()}
    unknown -= {"params", "param_names", "initial_lr"}
    return f"[optimizer] optimizer_kwargs has {', '.join(sorted(unknown))}, which no optimizer reads" if unknown else ""


def _is_in(name: str, stage: list[str]) -> bool:
    """Return whether a parameter belongs to one of the modules of a pipeline stage."""
    return any(name.startswith(f"{module}.") for module in stage)


def built_on_meta(config: Any) -> nn.Module:
    """Return the model of a trainer config on the meta device, so without values. May change the config."""
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    if config.override.imports:
        apply_overrides(config.override, config)
    with torch.device("meta"):
        return model_config.build()


def trained_parameters(model: nn.Module, config: Any) -> tuple[int, int]:
    """Return how many parameters of a trainer config's model are trained, and the bytes of each."""
    number = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return number, TORCH_DTYPE_MAP[config.training.dtype].itemsize


def _problem(section: str, key: str, value: Any, why: str) -> Problem:
    return Problem((section, key), f"= {shown(value)} needs a GPU, and there is none here: {why}")
