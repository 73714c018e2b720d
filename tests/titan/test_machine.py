"""What only a GPU can do is refused before the start where there is none, with the reason."""

import pytest
from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_dist_gemm

from everstep.titan.machine import needs_gpu


def overridden():
    config = llama3_debugmodel()
    config.override.imports = ["torchtitan.overrides.fused_swiglu.fused_swiglu"]
    return config


def symmetric():
    config = llama3_debugmodel()
    config.parallelism.enable_fsdp_symm_mem = True
    return config


def overlapped():
    config = llama3_debugmodel()
    config.compile.enable = config.compile.enable_async_tensor_parallel = True
    return config


def small_states():
    config = llama3_debugmodel()
    config.optimizer.implementation = "fused_opt_states_bf16"
    return config


def muon():
    config = llama3_debugmodel()
    config.optimizer.param_groups[-1].optimizer_name = "DistMuon"
    return config


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (overridden, ("override", "imports")),
        (symmetric, ("parallelism", "enable_fsdp_symm_mem")),
        (small_states, ("optimizer", "implementation")),
        (muon, ("optimizer", "param_groups")),
        (overlapped, ("compile", "enable_async_tensor_parallel")),
        (llama3_debugmodel_dist_gemm, ("job", "config")),
    ],
)
def test_a_kernel_of_gpus_is_named(make, key):
    [problem] = needs_gpu(make())
    assert problem.key == key
    assert "needs a GPU, and there is none here" in problem.message


def test_a_plain_model_needs_none():
    assert list(needs_gpu(llama3_debugmodel())) == []
