"""Damaged and hostile TOML: a ConfigError in one sentence, or a config whose numbers can be used."""

import math
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from damage import damaged
from everstep.config.checks import problems
from everstep.config.errors import ConfigError
from everstep.config.legacy import GONE, MOVED
from everstep.config.resolved import _toml_lines
from everstep.config.source import parse_source, read_source
from everstep.run.directory import LaunchError, read_toml
from everstep.titan.load import config_from_source, load_config

GOOD = """
[job]
module = "llama3"
config = "llama3_debugmodel"
[training]
steps = 10
local_batch_size = 2
global_batch_size = 8
disable_cuda_graphs = true
[fault_tolerance]
enable = true
groups = 2
stall_timeout_s = 120.0
[optimizer]
lr = 1e-3
[data]
source = "stdlib"
"""


def refusal(text, config_class, load=config_from_source):
    """Why it is refused; None if it is not."""
    try:
        config = load(parse_source(text, "run.toml"), config_class)
        return next((problem.message for problem in problems(config)), None)
    except ConfigError as error:
        return str(error)


def test_the_example_is_fine(config_class):
    assert refusal(GOOD, config_class) is None


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000 + "]" * 5000,
        "x = " + "{a = " * 3000 + "1" + "}" * 3000,
        "[" + ".".join("a" * 3000) + "]\nx = 1",
        ".".join("a" * 3000) + " = 1",
        "x = " + "9" * 5000,
        "x = 0x" + "f" * 5000,
        "x = 1e999",
        "x = nan",
        "x = -inf",
        "x = [1, [2.0, inf]]",
        "x = 99999999999999999999",
        "x = 2024-99-99",
        "x = 9999-12-31T23:59:60Z",
        "\x00",
        '"\\ud800" = 1',
    ],
    ids=range(15),
)
def test_what_no_parser_likes_is_a_sentence(text, config_class):
    said = refusal(text, config_class)
    assert said is not None
    assert said.startswith("run.toml")
    assert len(said) < 500
    assert "\n" not in said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stall_timeout_s = 120.0", "stall_timeout_s = nan"),
        ("stall_timeout_s = 120.0", "stall_timeout_s = inf"),
        ("stall_timeout_s = 120.0", "quorum_timeout_s = 1e18"),
        ("stall_timeout_s = 120.0", "metrics_port = 65536"),
        ("stall_timeout_s = 120.0", "metrics_port = 9223372036854775807"),
        ("stall_timeout_s = 120.0", 'lighthouse = "http://h:65536"'),
        ("stall_timeout_s = 120.0", 'lighthouse = "http://h:99999999"'),
        ("groups = 2", "groups = 9223372036854775807"),
        ("groups = 2", "group_id = 1000000"),
        ("lr = 1e-3", "lr = nan"),
        ("lr = 1e-3", "lr = 1" + "0" * 400),
        ('module = "llama3"', 'module = ".llama3"'),
        ('module = "llama3"', 'module = "a..b"'),
        ('module = "llama3"', 'module = ""'),
        ('module = "llama3"', 'module = "os; rm"'),
        ('source = "stdlib"', 'source = "stdlib"\n[dataloader]\nclass = ".x.Y"'),
        ('source = "stdlib"', 'source = "stdlib"\n[dataloader]\nclass = 7'),
        ('source = "stdlib"', 'source = "stdlib"\n[dataloader]\nclass = "os.path"'),
        ('source = "stdlib"', 'source = "\x1b[2J"'.replace("\x1b", "\\u001b")),
    ],
    ids=range(19),
)
def test_numbers_ports_and_modules_out_of_range_are_refused(old, new, config_class):
    assert old in GOOD
    said = refusal(GOOD.replace(old, new), config_class)
    assert said is not None
    assert said.isprintable()


PLACES = [
    *(name.split(".") for name in [*MOVED, *GONE]),
    *(name.split(".") for name in MOVED.values()),
    ["optimizer", "param_groups"],
    ["optimizer", "betas"],
    ["activation_checkpoint", "mode"],
    ["activation_checkpoint", "selective_ac_option"],
    ["activation_checkpoint", "memory_budget"],
    ["dataloader", "class"],
    ["dataloader", "weights"],
    ["override", "imports"],
    ["parallelism", "module_fqns_per_model_part"],
    ["fault_tolerance", "semi_sync_method"],
    ["quantize", "linear"],
    ["model_spec"],
    ["validator"],
    ["loss", "loss_fn", "class"],
]
SCALARS = st.sampled_from([True, 0, -1, 3, 0.5, "", "None", "op", "full", "selective", "torch.nn.Linear"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["class", "mode", "pattern", "x", "lr", ""]), inner, max_size=2)
    ),
    max_leaves=4,
)


def nested(settings):
    """A document with these values at these places; of two in each other's way, the first."""
    document = {}
    for place, value in settings:
        table = document
        for key in place[:-1]:
            table = table.setdefault(key, {}) if isinstance(table, dict) else table
        if isinstance(table, dict):
            table.setdefault(place[-1], value)
    return document


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), max_size=3))
def test_a_file_loads_or_is_refused(config_class, entries):
    base = [(["job", "module"], "llama3"), (["job", "config"], "llama3_debugmodel")]
    text = "\n".join(_toml_lines(nested([*entries, *base]), ()))
    refusal = None
    try:
        config_from_source(parse_source(text, "run.toml"), config_class)
    except ConfigError as error:
        refusal = str(error)
    assert refusal is None or refusal.startswith("run.toml:")


def test_a_pipe_and_a_giant_are_not_read(tmp_path, config_class, monkeypatch):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="no regular file"):
        load_config(tmp_path / "pipe.toml", config_class)
    with pytest.raises(LaunchError, match="no regular file"):
        read_toml(tmp_path / "pipe.toml")
    (tmp_path / "giant.toml").write_bytes(b"#" * (17 << 20))
    with pytest.raises(ConfigError, match="no regular file of at most"):
        read_source(tmp_path / "giant.toml")
    (tmp_path / "deep.toml").write_text("x = " + "[" * 5000)
    with pytest.raises(LaunchError, match="not valid TOML"):
        read_toml(tmp_path / "deep.toml")


def finite(value):
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def fuzz(config_class, rounds, seed):
    chance = random.Random(seed)
    refused = 0
    for number in range(rounds):
        text = damaged(GOOD.encode(), chance).decode(errors="replace")
        try:
            source = parse_source(text, "run.toml")
        except ConfigError:
            refused += 1
            continue
        assert finite(source.table)
        if number % 10 == 0:  # making a config takes milliseconds
            refused += refusal(text, config_class) is not None
    return refused


@pytest.mark.parametrize("rounds", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_files_are_a_sentence_or_a_config(config_class, rounds):
    assert fuzz(config_class, rounds, 1) > 0.4 * rounds
