"""A report of a directory that others wrote to overwrites no file of the reader's and shows none."""

import json
import os

import pytest

from everstep.report.page import write_page
from everstep.run.events import EventLog


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    EventLog(folder, None, None, "supervisor").emit("run_started", groups=1, ranks_per_group=1, seed=0, steps=1)
    return folder


def test_links_where_a_report_writes_are_replaced_and_not_written_through(run_dir, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("report.json", "report.json.tmp", "report.html", "report.html.tmp"):
        (run_dir / name).symlink_to(victim)
    page = write_page(run_dir)
    assert victim.read_text() == "precious"
    assert json.loads((run_dir / "report.json").read_text())["groups"] == 1
    assert page.read_text().startswith("<!doctype html>")
    assert not page.is_symlink()


def test_a_page_shows_no_file_that_a_link_names_and_waits_for_no_pipe(run_dir, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("[job]\nmodule = 'do-not-show-this'\n")
    (run_dir / "config.toml").symlink_to(secret)
    assert "do-not-show-this" not in write_page(run_dir).read_text()
    (run_dir / "config.toml").unlink()
    os.mkfifo(run_dir / "config.toml")
    write_page(run_dir)
    (run_dir / "config.toml").unlink()
    (run_dir / "config.toml").write_bytes(b"[job]\nmodule = '\xff'\n")
    write_page(run_dir)
    secret.replace(run_dir / "config.toml")
    assert "do-not-show-this" in write_page(run_dir).read_text()
