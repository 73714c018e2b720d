"""Whatever a file says, it loads or is refused with a ConfigError that begins with the file's name."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config.errors import ConfigError
from everstep.config.legacy import GONE, MOVED
from everstep.config.resolved import _toml_lines
from everstep.config.source import parse_source
from everstep.titan.load import config_from_source

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


def test_a_file_can_be_read_and_translated_without_torch():
    code = (
        "import sys\n"
        "from everstep.config import checks, errors, legacy, sections, source\n"
        "assert not {'torch', 'torchtitan'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("section", ["training", "model", "fault_tolerance", "optimizer", "job"])
def test_a_section_that_is_no_table_is_refused(config_class, section):
    source = parse_source(f"{section} = 3\n[profiling]\nprofile_freq = 1\n", "run.toml")
    with pytest.raises(ConfigError, match=r"^run\.toml"):
        config_from_source(source, config_class)
