"""Combinations that cannot work are refused, with the line of the key to change; the nearest ones that
work are not."""

import pytest

from everstep.config.checks import _TIMEOUTS, problems
from everstep.config.errors import ConfigError

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
"""Takes lines 4 to 11 of run.toml."""


def without(key):
    return "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(key))


REFUSED = {
    "fewer groups than the least": (
        GOOD.replace("min_groups = 2", "min_groups = 4"),
        "run.toml:11: [fault_tolerance] min_groups = 4 can never be met by groups = 3",
    ),
    "more spares than groups": (
        GOOD + "spares = 3\n",
        "run.toml:12: [fault_tolerance] spares = 3 leaves none of groups = 3 to compute",
    ),
    "exact sums that leave out what is lost": (
        GOOD + 'exact = true\non_loss = "shrink"\n',
        'run.toml:13: [fault_tolerance] on_loss = "shrink" leaves out what a lost group had, so the result depends '
        "on what failed: with [fault_tolerance] exact = true nothing may be left out",
    ),
    "audits without bits": (
        GOOD + "audit_slots = 0.1\n",
        "run.toml:12: [fault_tolerance] audit_slots = 0.1 compares bits: it needs exact = true",
    ),
    "an indivisible batch": (
        GOOD.replace("global_batch_size = 24", "global_batch_size = 25"),
        "run.toml:7: [training] global_batch_size = 25 must be a multiple of local_batch_size x DP ranks "
        "of a group = 2 x 1",
    ),
    "fewer slots than groups": (
        GOOD.replace("global_batch_size = 24", "global_batch_size = 4"),
        "run.toml:7: [training] global_batch_size = 4 has 2 slots of 2 rows (local_batch_size = 2 x 1 DP ranks) for 3 "
        "groups: every group needs one at least",
    ),
    "pipeline parallelism with CUDA graphs, which torchtitan refuses": (
        "[parallelism]\npipeline_parallel_degree = 2\n",
        "run.toml: CUDA graphs do not support pipeline parallelism yet. Set --training.disable_cuda_graphs.",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_combination_that_cannot_work_is_refused(load, tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == message


@pytest.mark.parametrize(
    ("section", "key", "value", "bound"),
    [
        ("semi_sync", "mixing", 1.0, "less than 1"),
        ("semi_sync", "outer_lr", 0.0, "more than 0"),
        ("training", "steps", 0, "at least 1"),
        ("fault_tolerance", "metrics_port", 65536, "at most 65535"),
        ("fault_tolerance", "audit_slots", 2.0, "at most 1"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused(load, section, key, value, bound):
    config = load(GOOD, check=False)
    config.semi_sync.method = "diloco"
    setattr(getattr(config, section), key, value)
    assert [p.message for p in problems(config)] == [f"[{section}] {key} must be {bound}, got {value}"]


@pytest.mark.parametrize(
    ("degrees", "ranks", "message"),
    [
        ({"tensor": 2}, 1, "tensor_parallel_degree = 2 takes a multiple of 2 ranks in a group, and a group has 1"),
        ({"data_shard": 4}, 1, "data_parallel_shard_degree = 4 takes 4 ranks in a group, and a group has 1"),
        (
            {"tensor": 2, "data_shard": 3},
            4,
            "tensor_parallel_degree = 2 x data_parallel_shard_degree = 3 takes 6 ranks in a group, and a group has 4",
        ),
        ({"tensor": 2, "context": 2}, 8, ""),
    ],
)
def test_a_groups_ranks_are_those_that_its_degrees_take(load, degrees, ranks, message):
    keys = {"data_shard": "data_parallel_shard_degree"}
    table = "".join(f"{keys.get(name, f'{name}_parallel_degree')} = {degree}\n" for name, degree in degrees.items())
    text = GOOD + "[parallelism]\n" + table
    if not message:
        assert load(text, ranks=ranks)
        return
    with pytest.raises(ConfigError) as caught:
        load(text, ranks=ranks)
    assert "run.toml:13: [parallelism] " in str(caught.value)
    assert message in str(caught.value)


def test_replicas_become_groups_and_it_is_said_in_a_line(load):
    warnings = []
    config = load(
        GOOD.replace("global_batch_size", "# ")
        + "[parallelism]\ndata_parallel_replicate_degree = 3\ndata_parallel_shard_degree = 2\n",
        warnings=warnings,
    )
    assert config.parallelism.data_parallel_replicate_degree == 1
    assert config.training.global_batch_size == config.training.local_batch_size * 2 * 3, (
        "torchtitan's, of all replicas"
    )
    [told] = warnings
    assert told.endswith("data_parallel_replicate_degree = 3: the replicas are 3 replica groups, one each")


@pytest.mark.parametrize(("shorter", "longer"), [row[:2] for row in _TIMEOUTS])
def test_timeouts_that_contain_each_other_are_in_order(load, shorter, longer):
    config = load(GOOD)
    limit = getattr(config.fault_tolerance, longer)
    setattr(config.fault_tolerance, shorter, limit)
    beginning = f"[fault_tolerance] {shorter} = {limit} must be less than {longer} = {limit}: "
    assert [p.key for p in problems(config) if p.message.startswith(beginning)] == [("fault_tolerance", shorter)]


OFF = GOOD.replace("enable = true", "enable = false")
