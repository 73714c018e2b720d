"""Loads TOML texts into a trainer's Config, and a text that every command accepts."""

import pytest

from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer

LLAMA = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'
GOOD = f"""{LLAMA}\
[training]
steps = 12
local_batch_size = 1
global_batch_size = 12
disable_cuda_graphs = true
[fault_tolerance]
enable = true
groups = 3
stall_timeout_s = 120.0
[optimizer]
lr = 1e-3
[data]
source = "stdlib"
"""


@pytest.fixture
def load(tmp_path):
    """A function that loads a TOML text as `run.toml` in `tmp_path`, by default based on llama3_debugmodel."""

    def load_text(text, overrides=(), *, base=LLAMA, kind=EverstepTrainer.Config, **more):
        path = tmp_path / "run.toml"
        path.write_text(base + text)
        return load_config(path, kind, overrides, **more)

    return load_text
