"""torchtitan's own recipes survive a kill in mid-step with torchtitan's own losses.

What came of all of them is in docs/recipes.md; campaign.py runs them.
"""

import pytest

import campaign
import catalog


def outcome(suite, name, folder):
    campaign.write_assets(folder)
    (folder / name).mkdir()
    return campaign.compare(catalog.load(suite, name), folder / name)


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("features", "llama3_debugmodel_pp2_1f1b"),
        pytest.param("features", "llama3_debugmodel_pp2_zbv", marks=pytest.mark.slow),
        pytest.param("features", "llama3_debugmodel_hsdp2x2", marks=pytest.mark.slow),
        pytest.param("features", "llama3_debugmodel_tp2", marks=pytest.mark.slow),
        pytest.param("features", "llama3_debugmodel_ddp2_cp2", marks=pytest.mark.slow),
        pytest.param("features", "llama3_debugmodel_sft", marks=pytest.mark.slow),
        pytest.param("models", "deepseek_v3_debugmodel_hsdp2x2_ep2", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_survives_a_kill_in_mid_step_with_torchtitans_losses(tmp_path, suite, name):
    found = outcome(suite, name, tmp_path)
    assert (found["result"], found["why"]) == ("passes", "")


def test_a_recipe_of_gpus_is_refused_before_the_start_with_the_reason(tmp_path):
    found = outcome("features", "llama3_debugmodel_fused_swiglu_tp2", tmp_path)
    assert found["result"] == "refused"
    assert found["why"].endswith("needs a GPU, and there is none here: it is a Triton kernel")
    assert not list(tmp_path.glob("*/run/events/*")), "nothing was begun"
