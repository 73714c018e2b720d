"""Errors of a wrong file or combination name line, key, the nearest valid key and the expected type."""

import pytest

from config.conftest import LLAMA
from everstep.config.checks import _TIMEOUTS, problems
from everstep.config.errors import ConfigError
from everstep.titan.load import replicas_as_groups

GOOD = """\
[training]
disable_cuda_graphs = true
local_batch_size = 2
global_batch_size = 24
[fault_tolerance]
enable = true
groups = 3
min_groups = 2
"""
"""Lines 4 to 11 of run.toml."""

SEMI = GOOD.replace("[training]", "[training]\nsteps = 100") + (
    '[semi_sync]\nmethod = "diloco"\nworkers = 4\nsync_steps = 10\n'
)
"""Lines 4 to 16 of run.toml."""

OPTIMIZER = GOOD + '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "AdamW"\noptimizer_kwargs = '

# Lines 1 to 3 are the base that the `load` fixture writes.
WRONG = {
    "unknown section": ("[trainig]\nsteps = 1\n",
        "run.toml:4: there is no section [trainig]; the nearest is [training]"),
    "unknown key": ("[training]\nsteps = 1\nseq_length = 128\n",
        "run.toml:6: [training] has no key 'seq_length'; the nearest is 'seq_len' (an integer)"),
    "string for an integer": ('[training]\nseq_len = "128"\n',
        'run.toml:5: [training] seq_len must be an integer, got "128"'),
    "a choice that is not there": ('[fault_tolerance]\nprocess_group = "mpi"\n',
        'run.toml:5: [fault_tolerance] process_group must be one of "gloo", "nccl", got "mpi"'),
    "what torchtitan's section refuses itself": ("[checkpoint]\nkeep_latest_k = 1\n",
        "run.toml:4: [checkpoint]: We need to maintain at least 2 checkpoint replicas, as the last one "
        "may be in the process of being saved."),
    "a key that a terminal would obey": ('[training]\n"\\u001b[2Jsteps" = 1\n',
        "run.toml:5: [training] has no key '?[2Jsteps'; the nearest is 'steps' (an integer)"),
    "not TOML": ("[training]\nsteps = \n", "run.toml:5: not valid TOML: Invalid value (column 9)"),
}  # fmt: skip

BASES = {
    "nothing": ("", 'run.toml: no base config: write [job] module = "llama3" and config = "llama3_debugmodel"'),
    "a section's key above all sections": ('lr = 3e-4\n[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n',
        "run.toml:1: there is no key 'lr' above the first section; [optimizer] has it"),
    "an unknown model": ('[job]\nmodule = "lama3"\nconfig = "llama3_8b"\n',
        'run.toml:2: [job] module = "lama3" is neither a model of torchtitan nor a module that can be '
        'imported; the nearest model is "llama3"'),
    "an unknown flavor": ('[job]\nmodule = "qwen3"\nflavor = "0.6b"\n',
        'run.toml:3: [job] flavor = "0.6b" is not a model of qwen3; the nearest is "0.6B" of "debugmodel", '
        '"debugmodel_non_fused_qkv", "0.6B", "1.7B", "4B", "8B", "14B", "32B", "debugmodel_moe", "30B-A3B", '
        '"235B-A22B"'),
}  # fmt: skip

REFUSED = {
    "fewer groups than the least": (GOOD.replace("min_groups = 2", "min_groups = 4"),
        "run.toml:11: [fault_tolerance] min_groups = 4 must be at most groups = 3"),
    "more spares than groups": (GOOD + "spares = 3\n",
        "run.toml:12: [fault_tolerance] spares = 3 must be less than groups = 3: spares compute nothing"),
    "exact sums that leave out what is lost": (GOOD + 'exact = true\non_loss = "shrink"\n',
        'run.toml:13: [fault_tolerance] on_loss = "shrink" leaves out the slots of a lost group, so the result depends '
        'on failures: with [fault_tolerance] exact = true it must be "redistribute"'),
    "audits without bits": (GOOD + "audit_slots = 0.1\n",
        "run.toml:12: [fault_tolerance] audit_slots = 0.1 needs exact = true, because an audit compares bits"),
    "two learning rates": (OPTIMIZER.replace("[[", "[optimizer]\nlr = 1e-3\n[[") + "{lr = 1e-4}\n",
        "run.toml:13: [optimizer] lr = 0.001, but its param_groups have 0.0001"),
    "an eps in quotes": (OPTIMIZER.replace("groups = 3", "groups = 3\nexact = true") + '{eps = "1e-8"}\n',
        "run.toml:13: [optimizer] eps must be 0 or more, got '1e-8'"),
    "a schedule that ends before the run": (
        GOOD.replace("[training]", "[lr_scheduler]\ntotal_steps = 9\n[training]\nsteps = 10"),
        "run.toml:5: [lr_scheduler] total_steps = 9 must be at least [training] steps = 10: after it the learning rate "
        "falls below 0, or rises again (cosine)"),
    "a beta": (OPTIMIZER + "{betas = 0.9}\n", "run.toml:12: [optimizer] betas must be two numbers in [0, 1), got 0.9"),
    "a beta of 1": (OPTIMIZER + "{betas = [0.9, 1.0]}\n",
        "run.toml:12: [optimizer] betas must be two numbers in [0, 1), got (0.9, 1.0)"),
    "a rate that decays too little": (GOOD + "[lr_scheduler]\ndecay_ratio = -0.5\n",
        "run.toml:13: [lr_scheduler] decay_ratio must be between 0 and 1, got -0.5"),
    "profiles that overlap": (GOOD + "[profiler]\nenable_profiling = true\nprofile_freq = 3\n",
        "run.toml:14: [profiler] profile_freq = 3 must be at least profiler_warmup + profiler_active = 4"),
    "a port that nothing can listen on": (GOOD + 'lighthouse = "http://h:0"\n',
        'run.toml:12: [fault_tolerance] lighthouse must be http://host:port, got "http://h:0"'),
    "a path that is too long for a file": (f'[data]\nsource = "tokens"\npath = "{"a" * 300}"\n',
        f'run.toml:6: [data] path = "{"a" * 300}": there is no such file'),
    "a folder of tokens": ('[data]\nsource = "tokens"\npath = "/tmp"\n',
        'run.toml:6: [data] path = "/tmp": this is a folder'),
    "an indivisible batch": (GOOD.replace("global_batch_size = 24", "global_batch_size = 25"),
        "run.toml:7: [training] global_batch_size = 25 must be a multiple of local_batch_size x DP ranks "
        "of a group = 2 x 1"),
    "fewer slots than groups": (GOOD.replace("global_batch_size = 24", "global_batch_size = 4"),
        "run.toml:7: [training] global_batch_size = 4 has 2 slots of 2 rows (local_batch_size = 2 x 1 DP ranks) for 3 "
        "groups: every group needs at least one"),
    "pipeline parallelism with CUDA graphs, which torchtitan refuses": ("[parallelism]\npipeline_parallel_degree = 2\n",
        "run.toml: CUDA graphs do not support pipeline parallelism yet. Set --training.disable_cuda_graphs."),
    "workers that do not divide the batch": (SEMI.replace("workers = 4", "workers = 5"),
        "run.toml:15: [semi_sync] workers = 5 must divide the batch: global_batch_size = 24 is not a multiple of 5 "
        "workers x local_batch_size = 2"),
    "fewer workers than groups": (SEMI.replace("workers = 4", "workers = 2"),
        "run.toml:15: [semi_sync] workers = 2 must be at least groups = 3: every group carries one"),
    "fragments that are not equally far apart": (SEMI + "fragments = 3\n",
        "run.toml:16: [semi_sync] sync_steps = 10 must be a multiple of fragments = 3: fragments are synchronised "
        "in turn, at equal intervals"),
    "an end before every fragment is synchronised": (
        SEMI.replace("steps = 100", "steps = 5") + "fragments = 2\n",
        "run.toml:5: [training] steps = 5 must be at least [semi_sync] sync_steps = 10, after which every fragment has "
        "been synchronised once"),
    "an outer step in bfloat16": (SEMI.replace("[training]", '[training]\ndtype = "bfloat16"'),
        'run.toml:5: [training] dtype = "bfloat16" must be "float32" with [semi_sync]: it is the dtype of the outer '
        "step and its sums. Compute in another with mixed_precision_param"),
    "checkpoints of workers on object storage": (
        SEMI + '[checkpoint]\nenable = true\ninterval = 10\nfolder = "s3://bucket/run"\n',
        "run.toml:20: [checkpoint] folder and initial_load_path must be on a file system with [semi_sync] method = "
        '"diloco": other values are not implemented yet'),
    **{
        f"{section} without groups, which torchtitan's trainer would leave out": (
            f"[{section}]\n{key} = {value}\n",
            f"run.toml:5: [{section}] {key} = {value} needs [fault_tolerance] enable = true",
        )
        for section, key, value in (
            ("semi_sync", "method", '"diloco"'), ("attention_check", "enable", "true"),
            ("snapshot", "enable", "true"), ("fault_tolerance", "exact", "true"),
        )
    },
    "workers without a method": ("[semi_sync]\nworkers = 4\n",
        'run.toml:5: [semi_sync] workers is not read with method = "none": remove it, or change the method'),
    "a part that no checkpoint has": ('[checkpoint]\nenable = true\nexclude_from_loading = ["optimiser"]\n',
        "run.toml:6: [checkpoint] exclude_from_loading has optimiser: it may name optimizer, lr_scheduler, dataloader, "
        "train_state only"),
    "a part of a checkpoint that each worker has": (
        SEMI + '[checkpoint]\nenable = true\ninterval = 10\nexclude_from_loading = ["optimizer"]\n',
        "run.toml:20: [checkpoint] exclude_from_loading must not name optimizer, which each worker has with "
        '[semi_sync] method = "diloco": other values are not implemented yet'),
    "snapshots of workers": (SEMI + "[snapshot]\nenable = true\n",
        'run.toml:18: [snapshot] enable must be false with [semi_sync] method = "diloco": other values are not '
        "implemented yet"),
}  # fmt: skip

ROWS = {
    **{what: (LLAMA, *row) for what, row in (WRONG | REFUSED).items()},
    **{what: (base, "", message) for what, (base, message) in BASES.items()},
}


@pytest.mark.parametrize(("base", "text", "message"), ROWS.values(), ids=ROWS.keys())
def test_a_wrong_file_is_refused_in_one_sentence(load, tmp_path, base, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text, base=base)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == message


@pytest.mark.parametrize(("section", "key", "value", "bound"), [
    ("semi_sync", "mixing", 1.0, "less than 1"), ("semi_sync", "outer_lr", 0.0, "more than 0"),
    ("training", "steps", 0, "at least 1"), ("checkpoint", "load_step", -5, "at least -1"),
    ("fault_tolerance", "metrics_port", 65536, "at most 65535"), ("training", "max_norm", 0.0, "more than 0"),
])  # fmt: skip
def test_a_value_out_of_its_bounds_is_refused(load, section, key, value, bound):
    config = load(GOOD, check=False)
    config.semi_sync.method, config.checkpoint.enable = "diloco", True
    setattr(getattr(config, section), key, value)
    assert [p.message for p in problems(config)] == [f"[{section}] {key} must be {bound}, got {value}"]


@pytest.mark.parametrize(("degrees", "ranks", "needed"), [
    ("tensor_parallel_degree = 2", 1, "a multiple of 2 ranks in a group, but a group has 1"),
    ("data_parallel_shard_degree = 4", 1, "4 ranks in a group, but a group has 1"),
    ("tensor_parallel_degree = 2 x data_parallel_shard_degree = 3", 4, "6 ranks in a group, but a group has 4"),
    ("tensor_parallel_degree = 2 x context_parallel_degree = 2", 8, ""),
    ("data_parallel_replicate_degree = 2", 3, "a multiple of 2 ranks in a group, but a group has 3"),
])  # fmt: skip
def test_a_groups_ranks_are_those_that_its_degrees_need(load, degrees, ranks, needed):
    """Replicas count as well if fault tolerance is off."""
    alone = "replicate" in degrees
    text = GOOD.replace("enable = true", "enable = false") if alone else GOOD
    config = load(f"{text}[parallelism]\n" + degrees.replace(" x ", "\n"), check=False)
    expected = f"[parallelism] {degrees} needs {needed}: change the degrees, or --ranks-per-group"
    assert [problem.message for problem in problems(config, ranks=ranks)] == ([expected] if needed else [])


def test_replicas_become_groups_and_it_is_said_in_a_line(load):
    warnings = []
    degrees = "[parallelism]\ndata_parallel_replicate_degree = 3\ndata_parallel_shard_degree = 2\n"
    config = load(GOOD.replace("global_batch_size", "# ") + degrees, warnings=warnings)
    assert config.parallelism.data_parallel_replicate_degree == 1
    training = config.training
    assert training.global_batch_size == training.local_batch_size * 2 * 3, "torchtitan's, of all replicas"
    [told] = warnings
    assert told.endswith("data_parallel_replicate_degree = 3: trains as 3 replica groups of one replica each")
    config = load(GOOD.replace("global_batch_size", "# ") + degrees, check=False)
    config.training.local_batch_size = 1  # by torchtitan, from the command line of torchrun
    assert (bool(replicas_as_groups(config)), config.training.global_batch_size) == (True, 1 * 2 * 3)


@pytest.mark.parametrize(("shorter", "longer"), [row[:2] for row in _TIMEOUTS])
def test_timeouts_that_contain_each_other_are_in_order(load, shorter, longer):
    config = load(GOOD)
    limit = getattr(config.fault_tolerance, longer)
    setattr(config.fault_tolerance, shorter, limit)
    beginning = f"[fault_tolerance] {shorter} = {limit} must be less than {longer} = {limit}: "
    assert [p.key for p in problems(config) if p.message.startswith(beginning)] == [("fault_tolerance", shorter)]
