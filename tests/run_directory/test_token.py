"""The run's token."""

import os
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
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(ValueError, match="token holds no token"):
        run_token(tmp_path)
    assert (tmp_path / "token").read_text() == "not a token"


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602, 0o666])
def test_a_token_that_others_could_know_or_change_is_refused(tmp_path, mode):
    run_token(tmp_path)
    (tmp_path / "token").chmod(mode)
    with pytest.raises(ValueError, match=f"with mode {mode:03o}: others"):
        run_token(tmp_path)


def test_a_token_elsewhere_is_not_followed(tmp_path):
    run_token(tmp_path / "other")
    (tmp_path / "token").symlink_to(tmp_path / "other" / "token")
    with pytest.raises(ValueError, match="is a link"):
        run_token(tmp_path)
    (tmp_path / "token").unlink()
    os.mkfifo(tmp_path / "token")
    with pytest.raises(ValueError, match="no regular file"):
        run_token(tmp_path)


def test_a_directory_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ValueError, match="chmod go-w"):
        run_token(tmp_path / "run")
    assert not (tmp_path / "run" / "token").exists()
    (tmp_path / "run").chmod(0o755)
    run_token(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 12345, 12345)
    with pytest.raises(ValueError, match="belongs to user 12345"):
        run_token(tmp_path / "run")
    os.chown(tmp_path / "run", 0, 0)
    run_token(tmp_path / "run")
    os.chown(tmp_path / "run" / "token", 12345, 12345)
    with pytest.raises(ValueError, match="belongs to user 12345"):
        run_token(tmp_path / "run")
