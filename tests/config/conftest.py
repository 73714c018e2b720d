"""A trainer's Config with our sections, for tests of how it is filled; nothing here trains."""

from dataclasses import dataclass, field

import pytest
from torchtitan.trainer import Trainer

from everstep.config.load import load_config
from everstep.config.sections import Data, FaultTolerance, Job


class SectionedTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        job: Job = field(default_factory=Job)
        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
        data: Data = field(default_factory=Data)


@pytest.fixture(scope="session")
def config_class():
    return SectionedTrainer.Config


@pytest.fixture
def load(tmp_path):
    """Loads a TOML text, by default on top of llama3_debugmodel, as `run.toml` of the working directory."""

    def load_text(
        text: str,
        overrides=(),
        *,
        base='[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n',
        check=True,
    ):
        path = tmp_path / "run.toml"
        path.write_text(base + text)
        return load_config(path, SectionedTrainer.Config, overrides, check=check)

    return load_text
