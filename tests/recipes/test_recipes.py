"""torchtitan's own recipes survive a kill in mid-step with torchtitan's own losses.

What came of all of them is in docs/recipes.md; campaign.py runs them.
"""

import pytest

import campaign
import catalog


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    campaign.write_assets(folder)
    found = campaign.Server(folder / "server.log")
    yield found
    found.end()


def outcome(server, suite, name, folder):
    recipe = catalog.Recipe(**server.ask(kind="recipe", suite=suite, name=name))
    return campaign.compare(server, recipe, folder)


@pytest.mark.parametrize(
    "name",
    [
        "llama3_debugmodel_pp2_1f1b",
        pytest.param("llama3_debugmodel_pp2_zbv", marks=pytest.mark.slow),
        pytest.param("llama3_debugmodel_hsdp2x2", marks=pytest.mark.slow),
        pytest.param("llama3_debugmodel_tp2", marks=pytest.mark.slow),
        pytest.param("llama3_debugmodel_ddp2_cp2", marks=pytest.mark.slow),
        pytest.param("llama3_debugmodel_sft", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_survives_a_kill_in_mid_step_with_torchtitans_losses(server, tmp_path, name):
    found = outcome(server, "features", name, tmp_path)
    assert (found["result"], found["why"]) == ("passes", "")


@pytest.mark.slow
def test_experts_of_two_ranks_survive_a_kill_in_mid_step(server, tmp_path):
    found = outcome(server, "models", "deepseek_v3_debugmodel_hsdp2x2_ep2", tmp_path)
    assert (found["result"], found["why"]) == ("passes", "")


def test_a_recipe_of_gpus_is_refused_before_the_start_with_the_reason(server, tmp_path):
    found = outcome(server, "features", "llama3_debugmodel_fused_swiglu_tp2", tmp_path)
    assert found["result"] == "refused"
    assert found["why"].endswith("needs a GPU, and there is none here: it is a Triton kernel")
    assert not (tmp_path / "run").exists(), "nothing was begun"
