"""The meaning of a file's keys: sections that can have one of several classes, parameter groups, base and flavor."""

from dataclasses import dataclass, field

import pytest
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from everstep.config.errors import ConfigError
from everstep.config.resolved import resolved_toml
from everstep.titan.trainer import EverstepTrainer


@pytest.mark.parametrize(("mode", "kind"), [
    ("full", FullAC.Config), ("selective", SelectiveAC.Config), ("memory_budget", MemoryBudgetAC.Config),
    ("none", type(None)),
])  # fmt: skip
def test_mode_chooses_the_activation_checkpointing(load, mode, kind):
    compiled = "[compile]\nenable = true\n" if mode == "memory_budget" else ""
    assert type(load(f'{compiled}[activation_checkpoint]\nmode = "{mode}"\n').activation_checkpoint) is kind


def test_an_array_of_strings_may_be_one_string_with_commas(load):
    config = load('[compile]\ncomponents = "model, loss"\n[checkpoint]\nexclude_from_loading = "dataloader"\n')
    assert (config.compile.components, config.checkpoint.exclude_from_loading) == (["model", "loss"], ["dataloader"])


@dataclass(kw_only=True, slots=True)
class MySection:
    depth: int = 1


class MyTrainer(EverstepTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(EverstepTrainer.Config):
        my_section: MySection = field(default_factory=MySection)


def test_one_more_field_is_one_more_section(load):
    config = load("[my_section]\ndepth = 2\n", kind=MyTrainer.Config)
    assert config.my_section == MySection(depth=2)
    again = load(resolved_toml(config), ["--my_section.depth", "3"], base="", kind=MyTrainer.Config)
    assert again.my_section.depth == 3
    with pytest.raises(ConfigError, match="has no key 'dept'; the nearest is 'depth'"):
        load("[my_section]\ndept = 2\n", kind=MyTrainer.Config)
