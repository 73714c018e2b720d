"""torchtitan's own recipes (`torchtitan_recipes.tests`), and the smallest run of each that keeps what it is about.

Only sizes are changed: layers, steps, rows, tokens a row, and float32 instead of bfloat16, whose roundings show the
order of a sum. Degrees of parallelism, schedules, optimizers, overrides and compilation are the recipe's.
"""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

from watched import toml

PACKAGE = "torchtitan_recipes.tests"
SUITES = ("features", "models", "h100", "flux")
STEPS = 5
HALF_WAY = 3
"""The step at which the first of two runs ends, of recipes that load a checkpoint."""

LOSS_TOLERANCE = 1e-5
"""Promised is 1e-4. What differs by more than roundings do is found at a tenth of it."""

COARSE_TOLERANCE = 5e-3
"""Of float8: a rounding may fall to the other side when a sum was made in another order."""

FIRST_RUN = {
    "llama3_debugmodel_full_checkpoint_load": "llama3_debugmodel_full_checkpoint_save",
    "llama3_debugmodel_fsdp2_tp2_pp2_load": "llama3_debugmodel_fsdp2_tp2_pp2_save",
    "llama3_debugmodel_optional_checkpoint_load_tp2": "llama3_debugmodel_optional_checkpoint_save",
    "llama3_debugmodel_hf_checkpoint_load": "llama3_debugmodel_hf_checkpoint_save",
}
"""Recipes that load what another one has written."""

HF_CHECKPOINT = "artifacts-to-be-uploaded/model_only_hf_checkpoint/hf_checkpoint/step-10"
"""Where the recipe that loads Hugging Face's format looks, below RUNNER_TEMP."""

FAULT_TOLERANCE = {
    "enable": True, "heartbeat_timeout_s": 4.0, "connect_timeout_s": 10.0, "reduce_timeout_s": 60.0,
    "join_timeout_s": 20.0, "quorum_timeout_s": 70.0, "stall_timeout_s": 90.0, "startup_timeout_s": 500.0,
    "audit_interval": 2,
}  # fmt: skip
"""Long waits: several runs of eight ranks share two cores."""


@dataclass(frozen=True)
class Recipe:
    """One recipe, as it can be run here.

    Attributes:
        suite, name: where torchtitan has it.
        groups, ranks: replica groups of the fault-tolerant run, and the ranks of each.
        replicas: how many replicas torchtitan's own run has.
        tolerance: by how much the losses of both may differ.
        sections: what is laid over the recipe.
    """

    suite: str
    name: str
    groups: int = 2
    ranks: int = 1
    replicas: int = 1
    tolerance: float = 0.0
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def toml(self, *, fault_tolerant: bool, steps: int = STEPS) -> str:
        table = {"job": {"module": "shallow", "config": f"{self.suite}__{self.name}"}, **self.sections}
        table["training"] = {**table.get("training", {}), "steps": steps}
        if fault_tolerant:
            # All groups take part in every step: who was killed has to heal before the others go on.
            table["fault_tolerance"] = {**FAULT_TOLERANCE, "min_groups": self.groups}
            table["fault_tolerance"]["groups"] = self.groups
        return toml(table)


def names() -> list[tuple[str, str]]:
    """(suite, name) of all recipes, in torchtitan's order."""
    found = []
    for suite in SUITES:
        module = importlib.import_module(f"{PACKAGE}.{suite}")
        found += [
            (suite, name)
            for name, function in vars(module).items()
            if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
        ]
    return found


def original(suite: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{PACKAGE}.{suite}"), name)()


def load(suite: str, name: str) -> Recipe:
    """The recipe with what it takes to run it. One without its libraries has its name alone, as nobody runs it."""
    try:
        config = original(suite, name)
    except (ImportError, ValueError):
        return Recipe(suite, name)
    parallel = config.parallelism
    tensor, context, pipeline = (
        getattr(parallel, f"{kind}_parallel_degree") for kind in ("tensor", "context", "pipeline")
    )
    replicas = parallel.data_parallel_replicate_degree
    shard = parallel.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, parallel.expert_parallel_degree // (tensor * context))
        shard = 2 if shard * tensor * context * pipeline * replicas == 1 else shard
    if config.compile.enable:
        shard = min(shard, 2)  # each rank has a compiler of its own
    groups = replicas if replicas > 1 else 2
    local = pipeline if pipeline > 1 else 1
    if parallel.pipeline_parallel_schedule_csv:
        local = 4  # as many microbatches as the file has
    slots = 2 * replicas if replicas > 1 else 3  # uneven among two groups; torchtitan's replicas take equal shares
    sections: dict[str, dict[str, Any]] = {
        "training": {
            "seq_len": 128 * context if context > 1 else 32,  # each rank has whole blocks of FlexAttention's mask
            "local_batch_size": local,
            "global_batch_size": local * shard * slots,
            # gpt_oss's experts compute in bfloat16 whatever they are given.
            "mixed_precision_param": "bfloat16" if config.model_spec.name == "gpt_oss" else "float32",
        },
        "parallelism": {"data_parallel_shard_degree": shard},
        "lr_scheduler": {"total_steps": 100},  # a run that ends earlier has the same rates
        "data": {"source": "stdlib"},
        "metrics": {"log_freq": 1},
        "debug": {"seed": 0},
    }
    if config.checkpoint.enable:
        sections["checkpoint"] = {"interval": 2}
    if type(config.dataloader).__qualname__ == "ChatDataLoader.Config":
        sections["data"] = {"source": "dataloader"}
        sections["training"]["seq_len"] = 64  # for a whole conversation
    if config.validator.enable:
        sections["validator"] = {"freq": 2, "steps": 1}
        sections["validator.dataloader"] = {"dataset": "c4_test"}
    if config.profiler.enable_profiling:
        sections["profiler"] = {"profile_freq": 4, "profiler_active": 1, "profiler_warmup": 1}
    ranks, tolerance = shard * tensor * context * pipeline, COARSE_TOLERANCE if "float8" in name else LOSS_TOLERANCE
    return Recipe(suite, name, groups, ranks, replicas, tolerance, sections)
