"""Translates the TOML keys of torchtitan 0.2 and 0.1.

torchtitan 0.3 reads no TOML, but users still have files written for 0.2, also with spellings of 0.1. The tables below
list every key of 0.2.2's `JobConfig`, of its torchft extension, and the older spellings of both, unless a key of the
same section and name exists today. `MOVED` has the new place of a key, `GONE` the replacement of a key that nothing
reads any more. A key that would change the arithmetic and has no counterpart is refused."""

from collections.abc import Iterator
from typing import Any

from .positions import Path, line_of
from .source import Source, describe

MOVED: dict[str, str] = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.print_args": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.name": "job.module",
    "model.flavor": "job.flavor",
    "model.hf_assets_path": "hf_assets_path",
    "model.tokenizer_path": "hf_assets_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.dataloader": "dataloader",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.deterministic": "debug.deterministic",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.context_parallel_degree": "parallelism.context_parallel_degree",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule_csv": "parallelism.pipeline_parallel_schedule_csv",
    "experimental.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "fault_tolerance.replica_id": "fault_tolerance.group_id",
    "fault_tolerance.group_size": "fault_tolerance.groups",
    "fault_tolerance.min_replica_size": "fault_tolerance.min_groups",
    "fault_tolerance.process_group_timeout_ms": "fault_tolerance.reduce_timeout_s",
    "fault_tolerance.semi_sync_method": "semi_sync.method",
    "fault_tolerance.sync_steps": "semi_sync.sync_steps",
    "fault_tolerance.num_fragments": "semi_sync.fragments",
    "fault_tolerance.fragment_sync_delay": "semi_sync.overlap_steps",
    "fault_tolerance.fragment_update_alpha": "semi_sync.mixing",
    "profiling": "profiler",
    "validation": "validator",
    "validation.enabled": "validator.enable",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
}
"""Key or table of 0.2 -> today's, with the same value (but `process_group_timeout_ms` is divided by 1000)."""

_CONVERTERS = "a registry config that applies the converter, named in [job] config, e.g. llama3_debugmodel_float8"
_VALIDATOR = "[training]: validation uses the batch size and length of training"

GONE: dict[str, str] = {
    "job.config_file": "the command line: --config FILE.toml",
    "job.description": "a comment: no program read it",
    "job.custom_config_module": "[job] module: a package of your own with a config_registry",
    "job.use_for_integration_test": "nothing: it marked torchtitan's own tests",
    "model.converters": _CONVERTERS,
    "model.print_after_conversion": "[debug] print_config",
    "model.norm_type": "the model's flavor",
    "optimizer.early_step_in_backward": "nothing: gradients are summed and clipped before a step",
    "optimizer.fused": '[optimizer] implementation = "fused"',
    "training.enable_fsdp_float8_all_gather": _CONVERTERS,
    "parallelism.disable_loss_parallel": "nothing: the loss is always parallel under tensor parallelism",
    "parallelism.enable_compiled_autograd": "nothing: torchtitan no longer uses compiled autograd",
    "parallelism.pipeline_parallel_split_points": "[parallelism] module_fqns_per_model_part",
    "experimental.pipeline_parallel_split_points": "[parallelism] module_fqns_per_model_part",
    "experimental.enable_compiled_autograd": "nothing: torchtitan no longer uses compiled autograd",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "nothing: the pipeline schedule decides it",
    "parallelism.context_parallel_rotate_method": "nothing: context parallelism gathers keys and values",
    "parallelism.expert_tensor_parallel_degree": "nothing: experts are not split by tensor parallelism",
    "parallelism.expert_parallel_comm_backend": (
        "a registry config with that dispatcher, named in [job] config, e.g. qwen3_moe_deepep"
    ),
    "checkpoint.interval_type": "nothing: [checkpoint] interval counts steps",
    "checkpoint.enable_ft_dataloader_checkpoints": (
        "nothing: data is addressed by committed step and slot, the same in all groups"
    ),
    "activation_checkpoint.selective_ac_option": (
        'mode = "selective", which recomputes by operator; every n-th layer is not available any more'
    ),
    "activation_checkpoint.early_stop": "nothing: recomputation always runs to the end of the block",
    "memory_estimation": "nothing: torchtitan no longer estimates memory",
    "quantize": _CONVERTERS,
    "float8": _CONVERTERS,
    "mx": _CONVERTERS,
    "experimental.custom_import": "[override] imports, or [job] module: a package of your own",
    "experimental.custom_args_module": "[job] module: a package of your own with a config_registry",
    "experimental.custom_model_path": "[job] module: a package of your own with a config_registry",
    "fault_tolerance.should_quantize": "nothing: workers' changes are not quantised",
    "fault_tolerance.module_fqns_per_model_fragment": "nothing: layers are dealt to the fragments in turn",
    "validation.local_batch_size": _VALIDATOR,
    "validation.seq_len": _VALIDATOR,
}
"""Key or table of 0.2 that nothing reads any more -> what to use instead, or why nothing replaces it."""


def translate(source: Source) -> str:
    """Rewrite `source.table` from 0.2's keys to today's, in place. Keys without a counterpart are removed.

    Returns:
        A message with each removed key, its line and what to use instead; "" if no key was removed.

    Raises:
        ConfigError: a key is set under its old and its new name, or it asks for a feature that is not supported.
    """
    dropped: list[tuple[int, str]] = []
    _refuse_converters(source)
    training = source.table.setdefault("training", {}) if "flavor" in _section(source, "model") else None
    if isinstance(training, dict):
        training.setdefault("disable_cuda_graphs", True)  # 0.2 had none to disable
    gone = GONE | _settle_semi_sync(source)
    if _section(source, "activation_checkpoint").get("selective_ac_option") == "op":  # what `selective` does today
        _pop(source.table, ("activation_checkpoint", "selective_ac_option"))
    for path in list(_leaves(source.table)):
        # The longest of the key's path and its parent tables' paths that is in MOVED or GONE.
        names = [".".join(map(str, path[:end])) for end in range(len(path), 0, -1)]
        name = next((name for name in names if name in MOVED or name in gone), "")
        if name in gone:
            line = line_of(source.text, path) or 0
            dropped.append((line, f"  {f'line {line}: ' if line else ''}{describe(path)} → {gone[name]}"))
            _pop(source.table, path)
        elif name:
            _move(source, path, (*MOVED[name].split("."), *path[name.count(".") + 1 :]))
        elif path in (("model",), ("experimental",)) and source.table.get(str(path[0])) == {}:  # it sets nothing
            _pop(source.table, path)
    rows = [row for _, row in sorted(dropped)]
    head = f"{source.file}: these keys of torchtitan 0.2 have no counterpart and are not used:"
    return "\n".join([head, *rows]) if rows else ""


def _section(source: Source, name: str) -> dict[str, Any]:
    table = source.table.get(name)
    return table if isinstance(table, dict) else {}


def _refuse_converters(source: Source) -> None:
    """Refuse an active converter. It changes the arithmetic: a run without it is not the run that the file asks for."""
    for section, key, what in (("model", "converters", "a converter"), ("float8", "enable_float8_linear", "float8")):
        if _section(source, section).get(key) not in (None, False, "", [], "None", ["None"]):
            raise source.error(
                (section, key),
                f"[{section}] {key} asks for {what}, which nothing here applies: start from {_CONVERTERS}; or remove "
                "the key, and train without it",
            )


def _settle_semi_sync(source: Source) -> dict[str, str]:
    """Set 0.2's defaults of semi-synchronous training, and change values that are spelt differently today. The keys
    themselves move to [semi_sync] later. Return key -> reason for the keys that the method does not read."""
    section = _section(source, "fault_tolerance")
    method = section.get("semi_sync_method", "")
    of_diloco = [f"fault_tolerance.{key}" for key in ("num_fragments", "fragment_sync_delay", "fragment_update_alpha")]
    if method in ("", "None"):
        section.pop("semi_sync_method", None)
        return dict.fromkeys(
            ["fault_tolerance.sync_steps", *of_diloco], "nothing: it is read with semi_sync_method only"
        )
    named = ("fault_tolerance", "module_fqns_per_model_fragment")
    if section.pop(named[1], None):
        raise source.error(named, f"{describe(named)} must be empty: layers are dealt to the fragments in turn")
    if isinstance(method, str):
        section["semi_sync_method"] = method.lower()
    section.setdefault("sync_steps", 5)
    if section.get("should_quantize") is False:
        del section["should_quantize"]
    is_local = section["semi_sync_method"] == "local_sgd"
    return dict.fromkeys(of_diloco if is_local else (), 'nothing: it is read with semi_sync_method = "diloco" only')


def _move(source: Source, old: Path, new: Path) -> None:
    value = _pop(source.table, old)
    if old == ("model", "name") and value == "llama3_ft":
        value = "llama3"  # the same model, for 0.2's torchft trainer
    if old[-1] == "process_group_timeout_ms" and isinstance(value, int | float):
        value = value / 1000
    *tables, key = new
    target: dict[str, Any] = source.table
    for depth, table in enumerate(tables, 1):
        target = target.setdefault(str(table), {})
        if not isinstance(target, dict):
            raise source.error(new[:depth], f"{describe(new[:depth])} must be a table")
    if key in target:
        raise source.error(old, f"{describe(old)} is torchtitan 0.2's name of {describe(new)}, which the file sets too")
    target[str(key)] = value
    source.written_as[new] = old


def _leaves(table: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all values in `table` that are not tables, and of empty tables."""
    if isinstance(table, dict) and (table or not path):
        for key, value in table.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path


def _pop(table: dict[str, Any], path: Path) -> Any:
    """Remove and return a value, and remove the tables that become empty."""
    key = str(path[0])
    if len(path) == 1:
        return table.pop(key)
    value = _pop(table[key], path[1:])
    if not table[key]:
        del table[key]
    return value
