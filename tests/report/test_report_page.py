"""The page of a run, in a real browser where there is one."""

import itertools
import shutil
import subprocess
import time

import pytest

from everstep.report import score
from everstep.report.page import write_page
from everstep.report.times import STATES
from simulator import Simulator

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def simulated(folder, attempts, seed=0, groups=3):
    """A run directory with the log of a simulated run: of every ten attempts a group dies in one."""
    run = Simulator(groups, slots=6, seed=seed)
    for index in range(attempts):
        run.play({5: "kill", 6: "revive"}.get(index % 10, "go"), index)
    run.events()
    run.log.write(folder)
    (folder / "config.toml").write_text("[training]\nsteps = 10  # <b>not markup</b>\n")
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
    text, complaints = opened(write_page(run, other), tmp_path, "--window-size=390,800")
    assert complaints == []
    assert text.count("<svg") == 5
    assert "attempts thrown away" in text
    assert "&lt;b&gt;not markup" in text


def test_it_needs_nothing_but_itself(tmp_path):
    text = write_page(simulated(tmp_path / "run", 40)).read_text()
    for outside in ('src="http', 'href="http', "@import", "<script"):
        assert outside not in text
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text


@pytest.mark.slow
def test_ten_thousand_steps_and_a_thousand_faults_stay_small(tmp_path):
    run = simulated(tmp_path / "run", 12_000)
    begin = time.monotonic()
    page = write_page(run)
    assert time.monotonic() - begin < 60
    figures = score.score(run)
    assert figures["steps"] >= 9_000
    assert figures["kills"] >= 1_000
    assert page.stat().st_size < 5_000_000


def test_the_times_of_a_group_fill_its_sessions(tmp_path):
    found = score.measure(simulated(tmp_path / "run", 200))
    for group, parts in found.stretches.items():
        assert all(a.end == b.begin for a, b in itertools.pairwise(parts))
        total = sum(found.figures["time_by_group"][str(group)].values())
        assert total == pytest.approx(parts[-1].end - parts[0].begin)
    assert found.figures["productive_s"] > found.figures["restarting_s"] > 0
    assert {part.state for parts in found.stretches.values() for part in parts} <= set(STATES)
