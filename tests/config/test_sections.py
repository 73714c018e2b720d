"""What the keys of a file mean: sections that are one of several classes, parameter groups, base and
flavor."""

from dataclasses import dataclass, field

import pytest
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HFDataSource, InterleavedHuggingFaceTextDataLoader
from torchtitan.models.llama3 import config_registry, model_registry

from everstep.config.errors import ConfigError
from everstep.config.resolved import resolved_toml
from everstep.titan.load import load_config
from sectioned import SectionedTrainer


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("full", FullAC.Config),
        ("selective", SelectiveAC.Config),
        ("memory_budget", MemoryBudgetAC.Config),
        ("none", type(None)),
    ],
)
def test_mode_chooses_the_activation_checkpointing(load, mode, kind):
    compiled = "[compile]\nenable = true\n" if mode == "memory_budget" else ""
    assert type(load(f'{compiled}[activation_checkpoint]\nmode = "{mode}"\n').activation_checkpoint) is kind


def test_class_chooses_another_component_and_its_keys(load):
    config = load(
        f'[dataloader]\nclass = "{InterleavedHuggingFaceTextDataLoader.__module__}'
        '.InterleavedHuggingFaceTextDataLoader"\nseed = 3\n'
        'sources = [{ dataset = "c4", weight = 2 }, { dataset = "c4_test" }]\n'
    )
    assert config.dataloader == InterleavedHuggingFaceTextDataLoader.Config(
        seed=3, sources=[HFDataSource(dataset="c4", weight=2), HFDataSource(dataset="c4_test")]
    )


def test_lr_and_its_kin_stand_for_every_parameter_group(load):
    config = load("[optimizer]\nlr = 1\nbeta2 = 0.99\nweight_decay = 0.0\n")
    (group,) = config.optimizer.param_groups
    assert group.optimizer_kwargs == {"lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    assert isinstance(group.optimizer_kwargs["lr"], float)


def test_lr_is_refused_for_groups_that_differ_in_it(load, tmp_path):
    base = '[job]\nmodule = "qwen3"\nconfig = "qwen3_debugmodel_moe_param_groups"\n'
    with pytest.raises(ConfigError) as caught:
        load("[optimizer]\nlr = 1e-3\n", base=base)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == (
        "run.toml:5: [optimizer] lr cannot stand for all 3 parameter groups, which have 0.0008, 0.0001, "
        "0.0008: write [[optimizer.param_groups]] instead"
    )


def test_flavor_exchanges_the_model_of_a_config_and_the_vocabulary_of_its_loss(load):
    base = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\nflavor = "1B"\n'
    config = load("", base=base)
    assert (config.model_spec.name, config.model_spec.flavor) == ("llama3", "1B")
    assert config.training == config_registry.llama3_debugmodel().training
    ((_, loss, _, _),) = config.loss.traverse(CrossEntropyLoss.Config)
    assert loss.global_vocab_size == model_registry("1B").model.vocab_size == 128256


def test_a_package_of_ones_own_can_be_the_base(load, tmp_path, monkeypatch):
    (tmp_path / "my_models").mkdir()
    (tmp_path / "my_models" / "config_registry.py").write_text(
        "from torchtitan.models.llama3 import config_registry\n"
        "def mine():\n"
        "    config = config_registry.llama3_debugmodel()\n"
        "    config.training.steps = 77\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load("", base='[job]\nmodule = "my_models"\nconfig = "mine"\n').training.steps == 77


@dataclass(kw_only=True, slots=True)
class MySection:
    depth: int = 1


class MyTrainer(SectionedTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(SectionedTrainer.Config):
        my_section: MySection = field(default_factory=MySection)


def test_one_more_field_is_one_more_section(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n[my_section]\ndepth = 2\n')
    config = load_config(path, MyTrainer.Config)
    assert config.my_section == MySection(depth=2)
    path.write_text(resolved_toml(config))
    assert load_config(path, MyTrainer.Config, ["--my_section.depth", "3"]).my_section.depth == 3
    path.write_text('[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n[my_section]\ndept = 2\n')
    with pytest.raises(ConfigError, match="has no key 'dept'; the nearest is 'depth'"):
        load_config(path, MyTrainer.Config)
