"""The run's token."""

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep.run.token import run_token


def test_everybody_gets_the_same_token_however_many_ask_at_once(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(lambda _: run_token(tmp_path / "run"), range(64)))
    assert len(tokens) == 1
    assert len(tokens.pop()) == 32
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["token"], "no drafts are left"


def test_only_its_owner_reads_it(tmp_path):
    run_token(tmp_path)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_a_broken_token_is_named_and_left_alone(tmp_path):
    (tmp_path / "token").write_text("not a token")
    with pytest.raises(ValueError, match="token holds no token"):
        run_token(tmp_path)
    assert (tmp_path / "token").read_text() == "not a token"
