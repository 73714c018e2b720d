"""Loads TOML texts into a trainer's Config."""

import pytest

from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer

LLAMA = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'


@pytest.fixture(scope="session")
def config_class():
    return EverstepTrainer.Config


@pytest.fixture
def load(tmp_path):
    """A function that loads a TOML text as `run.toml` in `tmp_path`, by default based on llama3_debugmodel."""

    def load_text(text, overrides=(), *, base=LLAMA, kind=EverstepTrainer.Config, **more):
        path = tmp_path / "run.toml"
        path.write_text(base + text)
        return load_config(path, kind, overrides, **more)

    return load_text
