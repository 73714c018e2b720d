"""Damaged and hostile TOML: a ConfigError in one sentence, or a config whose numbers can be used."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config.checks import problems
from everstep.config.errors import ConfigError
from everstep.config.legacy import GONE, MOVED
from everstep.config.resolved import _toml_lines
from everstep.config.source import parse_source, read_source
from everstep.titan.load import config_from_source

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


def refusal(text, config_class):
    """Why it is refused; None if it is not."""
    try:
        config = config_from_source(parse_source(text, "run.toml"), config_class)
        return next((problem.message for problem in problems(config)), None)
    except ConfigError as error:
        return str(error)


WRONG = [
    # whole documents, and changes of the good one: nothing that a run could be made of
    *((GOOD, text) for text in (
        "x = " + "[" * 5000 + "]" * 5000, "x = " + "{a = " * 3000 + "1" + "}" * 3000, "x = " + "9" * 5000,
        "[" + ".".join("a" * 3000) + "]\nx = 1", ".".join("a" * 3000) + " = 1", "x = 0x" + "f" * 5000, "x = 1e999",
        "x = nan", "x = -inf", "x = [1, [2.0, inf]]", "x = 99999999999999999999", "x = 2024-99-99",
        "x = 9999-12-31T23:59:60Z", "\x00", '"\\ud800" = 1',
    )),
    *(("stall_timeout_s = 120.0", text) for text in (
        "stall_timeout_s = nan", "quorum_timeout_s = 1e18", "metrics_port = 65536", 'lighthouse = "http://h:65536"',
        "metrics_port = 9223372036854775807", 'lighthouse = "http://h:99999999"',
    )),
    *(("groups = 2", text) for text in ("groups = 9223372036854775807", "group_id = 1000000")),
    *(("lr = 1e-3", text) for text in ("lr = nan", "lr = 1" + "0" * 400)),
    *(('module = "llama3"', f'module = "{name}"') for name in (".llama3", "a..b", "", "os; rm")),
    *(('source = "stdlib"', f"source = {text}") for text in (
        '"stdlib"\n[dataloader]\nclass = ".x.Y"', '"stdlib"\n[dataloader]\nclass = 7',
        '"stdlib"\n[dataloader]\nclass = "os.path"', '"\\u001b[2J"',
    )),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [("", ""), *WRONG], ids=range(len(WRONG) + 1))
def test_what_no_run_can_be_made_of_is_a_sentence(old, new, config_class):
    assert old in GOOD
    said = refusal(GOOD.replace(old, new) if old else GOOD, config_class)
    assert (said is None) == (not old)
    assert said is None or (said.isprintable() and len(said) < 500)


def test_a_pipe_and_a_giant_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "giant.toml").write_bytes(b"#" * (17 << 20))
    for name in ("pipe.toml", "giant.toml"):
        with pytest.raises(ConfigError, match="no regular file"):
            read_source(tmp_path / name)


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
    said = refusal(text, config_class)
    assert said is None or said.startswith(("run.toml:", "["))
