"""The page of a run, in a real browser where there is one."""

import shutil
import subprocess

import pytest

from simulator import Simulator
from timeline import Timeline, page_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def simulated(folder, attempts, seed=0, groups=3):
    """A run directory with the log of a simulated run: of every ten attempts a group dies in one."""
    run = Simulator(groups, slots=6, seed=seed)
    for index in range(attempts):
        run.play({5: "kill", 6: "revive"}.get(index % 10, "go"), index)
    run.events()
    run.log.write(folder)
    return folder


def opened(page, tmp_path, *flags):
    """The page's document as the browser has it after loading, and what its console said."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path}/profile", *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_opens_it_without_complaint(tmp_path):
    run, other = simulated(tmp_path / "run", 60), simulated(tmp_path / "other", 60, seed=1)
    text, complaints = opened(page_of(run, other), tmp_path, "--window-size=390,800")
    assert complaints == []
    assert text.count("<svg") == text.count("data-curve=") >= 4
    assert "0 thrown away" in text
    for outside in ('src="http', 'href="http', "@import", "<script src"):
        assert outside not in text, "it needs nothing but itself"


def test_links_where_a_report_writes_are_replaced_and_the_config_is_not_shown(tmp_path):
    run, victim = simulated(tmp_path / "run", 3), tmp_path / "victim"
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
