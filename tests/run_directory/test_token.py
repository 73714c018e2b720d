"""The run's token."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep.run.files import write_json
from everstep.run.token import HOME_FILE, own_token, run_token


def test_everybody_gets_the_same_token_however_many_ask_at_once(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        (token,) = set(pool.map(lambda _: run_token(tmp_path / "run"), range(64)))
    assert len(token) == 32
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["token"], "no drafts are left"
    assert (tmp_path / "run" / "token").stat().st_mode & 0o777 == 0o600
    for damaged in (3, "a\0b"):
        write_json(tmp_path / "run" / HOME_FILE, {"run_dir": damaged})
        assert own_token(tmp_path / "run") == token
    (tmp_path / "run" / HOME_FILE).touch()
    before = (tmp_path / "run").stat().st_mtime_ns
    assert own_token(tmp_path / "run") == token
    assert (tmp_path / "run").stat().st_mtime_ns == before, "nothing is written: the disk may be full"


def link(path):
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def state_of_all(path):
    path.with_name("state").mkdir()
    path.with_name("state").chmod(0o777)


REFUSED = {
    "holds no token": lambda path: path.write_text("not a token"),
    "with mode 644: others": lambda path: path.chmod(0o644),
    "with mode 620: others": lambda path: path.chmod(0o620),
    "is a link": link,
    "not a regular file": pipe,
    "chmod -R go-w": lambda path: path.parent.chmod(0o777),
    "/state .mode 777.: chmod -R go-w": state_of_all,
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_token_that_others_could_know_or_change_is_refused_and_left_alone(tmp_path, why):
    run_token(tmp_path)
    REFUSED[why](tmp_path / "token")
    before = sorted((path.name, path.lstat().st_ino) for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=why):
        run_token(tmp_path)
    assert sorted((path.name, path.lstat().st_ino) for path in tmp_path.iterdir()) == before
