"""Settings that need a GPU are refused before the start on a machine without one, with the reason."""

import sys
from pathlib import Path

import pytest
from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_dist_gemm

from everstep.titan.machine import needs_gpu
from forked import ran
from watched import environment

KERNELS = [
    ("override.imports", ["torchtitan.overrides.fused_swiglu.fused_swiglu"]),
    ("parallelism.enable_fsdp_symm_mem", True),
    ("optimizer.implementation", "fused_opt_states_bf16"),
    ("compile.enable_async_tensor_parallel", True),
    ("checkpoint.async_mode", "async_with_pinned_mem"),
]


@pytest.mark.parametrize(("place", "value"), KERNELS)
def test_a_kernel_of_gpus_is_named_and_a_plain_model_has_none(place, value):
    config, (section, key) = llama3_debugmodel(), place.split(".")
    assert list(needs_gpu(config)) == []
    config.compile.enable, config.checkpoint.enable = section == "compile", section == "checkpoint"
    setattr(getattr(config, section), key, value)
    [problem] = needs_gpu(config)
    assert problem.key == (section, key)
    assert "needs a GPU, and there is none here" in problem.message
    [recipe] = needs_gpu(llama3_debugmodel_dist_gemm())
    assert recipe.key == ("job", "config")


OF_GPUS = """
from everstep.titan import trainer
from torchtitan.train import main
trainer.device_type = "cuda"  # as torchtitan says on its own
main()
"""


def test_torchtitans_own_entry_point_names_ours_where_there_is_no_accelerator(tmp_path):
    config = Path(__file__).parents[2] / "configs" / "demo.toml"
    flags = ["--module", "everstep", "--config", str(config), "--dump_folder", str(tmp_path)]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = ran([sys.executable, "-c", OF_GPUS, *flags], env=environment(**ranks))
    assert ended.returncode != 0
    assert "PyTorch sees no accelerator; -m everstep.train trains on the CPU" in ended.stderr.splitlines()[-1]
    flags[3] = "gone.toml"
    ended = ran([sys.executable, "-m", "everstep.train", *flags], env=environment(**ranks))
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "everstep: gone.toml: cannot be read: No such file or directory"
