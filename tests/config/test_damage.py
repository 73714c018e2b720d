"""Damaged and hostile TOML gives a ConfigError with one sentence, or a config whose numbers can be used."""

import random

import pytest

from config.conftest import GOOD
from damage import damaged
from everstep.config.checks import problems
from everstep.config.errors import ConfigError
from everstep.config.source import parse_source
from everstep.titan.load import config_from_source
from everstep.titan.trainer import EverstepTrainer


def refusal(text):
    """Return the message with which a TOML text is refused; None if it is not refused."""
    try:
        config = config_from_source(parse_source(text, "run.toml"), EverstepTrainer.Config)
        return next((problem.message for problem in problems(config)), None)
    except ConfigError as error:
        return str(error)


WRONG = [
    # (text in GOOD, its replacement): documents that no run could use
    *((GOOD, text) for text in (
        "x = " + "[" * 5000 + "]" * 5000, "x = " + "{a = " * 3000 + "1" + "}" * 3000, "x = " + "9" * 5000,
        "[" + ".".join("a" * 3000) + "]\nx = 1", ".".join("a" * 3000) + " = 1", "x = 0x" + "f" * 5000, "x = 1e999",
        "x = nan", "x = -inf", "x = [1, [2.0, inf]]", "x = 99999999999999999999", "x = 2024-99-99",
        "x = 9999-12-31T23:59:60Z", "\x00", '"\\ud800" = 1',
    )),
    *(("stall_timeout_s = 120.0", text) for text in (
        "stall_timeout_s = nan", "quorum_timeout_s = 1e18", "metrics_port = 65536", 'lighthouse = "http://h:65536"',
        "metrics_port = 9223372036854775807", 'lighthouse = "http://h:99999999"',
    )),
    *(("groups = 3", text) for text in ("groups = 9223372036854775807", "group_id = 1000000")),
    *(("lr = 1e-3", text) for text in ("lr = nan", "lr = 1" + "0" * 400)),
    *(('module = "llama3"', f'module = "{name}"') for name in (".llama3", "a..b", "", "os; rm")),
    *(('source = "stdlib"', f"source = {text}") for text in (
        '"stdlib"\n[dataloader]\nclass = ".x.Y"', '"stdlib"\n[dataloader]\nclass = 7',
        '"stdlib"\n[dataloader]\nclass = "os.path"', '"\\u001b[2J"', '"stdlib"\n[snapshot]\nmemory_reserve_gb = -1.0',
        '"stdlib"\n[snapshot]\nsegment_dir = "shm"',
    )),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [("", ""), *WRONG], ids=range(len(WRONG) + 1))
def test_a_damaged_config_is_refused_in_a_sentence(old, new):
    assert old in GOOD
    said = refusal(GOOD.replace(old, new) if old else GOOD)
    assert (said is None) == (not old)
    assert said is None or (said.isprintable() and len(said) < 500)


@pytest.mark.parametrize("rounds", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_damaged_file_loads_or_is_refused(rounds):
    chance = random.Random(rounds)
    for _ in range(rounds):
        said = refusal(damaged(GOOD.encode(), chance).decode(errors="replace"))
        assert said is None or said.startswith(("run.toml", "["))
