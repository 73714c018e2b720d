"""torchtitan's own recipes keep its losses under a kill in mid-step, or are refused, as docs/recipes.md says."""

import re
from pathlib import Path

import pytest

from everstep.titan import cpu

if not cpu.has_accelerator():
    cpu.stand_in()

import campaign
import catalog
from assets import write_assets

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
TOLD = {
    name: result
    for result, names in re.findall(r"^\| ((?:passes|needs|refused).*?) \| (.*) \|$", PAGE, re.MULTILINE)
    for name in names.split("<br>")
}
"""By recipe, its result."""
QUICK = ("llama3_debugmodel_pp2_1f1b", "llama3_debugmodel_fused_swiglu_tp2")


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TOLD])  # fmt: skip
def test_a_recipe_does_what_the_docs_say(tmp_path, monkeypatch, name):
    monkeypatch.setenv("RUNNER_TEMP", str(tmp_path))  # a recipe that loads a checkpoint looks there
    write_assets(tmp_path)
    (tmp_path / name).mkdir()
    (suite,) = (suite for suite, other in catalog.names() if other == name)
    found = campaign.compare(catalog.load(suite, name), tmp_path / name)
    if not TOLD[name].startswith("refused") and re.search("No module named|is not installed", found["why"]):
        pytest.skip(found["why"])
    if TOLD[name].startswith("passes"):
        assert (found["result"], found["why"]) == ("passes", "")
    else:
        assert found["result"] == "refused"
        assert ("needs a GPU, and there is none here" in found["why"]) == TOLD[name].startswith("needs a GPU")
        assert not list(tmp_path.glob("*/run/events/*")), "nothing was begun"
