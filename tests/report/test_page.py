"""Tests of a run's page, in a real browser if there is one."""

import shutil
import subprocess

import pytest

from timeline import Timeline, finished_run, page_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_opens_it_without_complaint(tmp_path):
    run, other = finished_run().write(tmp_path / "run"), finished_run(0.25).write(tmp_path / "other")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path}/profile", "--window-size=390,800", "--dump-dom"]
    page = page_of(run, other).as_uri()
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=120, check=True)
    assert ":CONSOLE" not in done.stderr
    text = done.stdout
    assert [text.count(f'class="{who}" d="M') for who in ("mine", "other", "fault")] == [4, 4, 4]
    assert "0 thrown away" in text
    for outside in ('src="http', 'href="http', "@import", "<script src"):
        assert outside not in text, "it needs nothing but itself"


def test_links_where_a_report_writes_are_replaced_and_the_config_is_not_shown(tmp_path):
    run, victim = finished_run().write(tmp_path / "run"), tmp_path / "victim"
    victim.write_text("[job]\nmodule = 'do-not-show-this'\n")
    for name in ("report.json", "report.json.tmp", "report.html", "report.html.tmp", "config.toml"):
        (run / name).symlink_to(victim)
    page = page_of(run)
    assert victim.read_text().startswith("[job]")
    assert not page.is_symlink()
    assert page.read_text().startswith("<!doctype html>")
    assert "do-not-show-this" not in page.read_text()


def test_a_run_without_a_step_claims_nothing_and_one_that_failed_looks_failing(tmp_path):
    line = Timeline().add(0, "run_started", role="supervisor", groups=2, steps=8)
    text = page_of(line.write(tmp_path / "begun")).read_text()
    assert "No step yet." in text
    assert "exactly once" not in text
    line.add(5, "run_ended", role="supervisor", status="failed", reason="every group was given up")
    text = page_of(line.write(tmp_path / "failed")).read_text()
    assert '<p class="broken">The run is not done: failed, every group was given up.</p>' in text
    assert "exactly once" not in text
