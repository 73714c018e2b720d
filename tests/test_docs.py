"""The docs name only files, commands and campaigns that exist, and explain every fault, figure and metric."""

import json
import re
from pathlib import Path

import pytest
import yaml

from everstep.chaos.kinds import FAULTS
from everstep.cli import COMMANDS
from everstep.report import metrics
from everstep.report.account import Account, read
from everstep.report.score import figures_of

ROOT = Path(__file__).parents[1]
METRICS = {
    family.name.removeprefix("everstep_") + ("_total" if family.type == "counter" else "")
    for family in metrics.figures(Account(), 1)
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def text_of(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_campaigns_exist(page):
    text = page.read_text()
    for command in re.findall(r"(?:^    |`)everstep ([a-z]+)", text, flags=re.MULTILINE):
        assert command in COMMANDS, f"{page.name} names everstep {command}"
    for file in re.findall(r"\b((?:configs|scripts|bench)/[\w./-]*\w)", text):
        assert (ROOT / file).exists(), f"{page.name} names {file}"


def test_the_readme_links_every_page():
    assert not [page.name for page in PAGES[1:] if f"docs/{page.name}" not in text_of("README.md")]


def test_every_fault_that_a_user_can_make_has_its_row():
    assert not [name for name in FAULTS if f"`{name}`" not in text_of("docs/faults.md")]
    assert not [name for name in FAULTS if f"`{name}`" not in text_of("docs/chaos.md")]


def named(names, text):
    """Return those of `names` that the text contains. In the text, `a_b_c`, `_d` stands for a_b_c and a_b_d."""
    return {name for name in names if f"`{name}`" in text or f"`_{name.rpartition('_')[2]}`" in text}


def test_every_figure_is_explained():
    fields = {*figures_of(read([]))}
    assert fields == named(fields, text_of("docs/report.md"))
    assert named(METRICS, text_of("docs/monitoring.md")) == METRICS


def test_dashboard_and_alerts_name_figures_that_exist():
    dashboard, alerts = json.loads(text_of("docs/grafana.json")), yaml.safe_load(text_of("docs/alerts.yml"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    drawn, watched = ({*re.findall(r"\beverstep_(\w+)", " ".join(said))} for said in (expressions, rules))
    assert drawn == METRICS, "the dashboard shows all of them"
    assert watched <= METRICS
