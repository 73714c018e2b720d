"""The page while a run goes: what the file would be, again and again."""

import shutil
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from everstep.report import serve
from everstep.report.page import write_page
from timeline import Timeline

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def going(tmp_path, monkeypatch):
    """A run of five steps so far, and its server."""
    monkeypatch.setattr(serve, "KEPT_S", 0.1)
    monkeypatch.setattr(serve, "SHARE", 10.0)
    line = Timeline().add(0, "run_started", role="supervisor", groups=1, steps=9).start(0.5, 0)
    for step in range(1, 6):
        line.commit(float(step), step, [0])
    line.write(tmp_path)
    server = serve.PageServer(tmp_path)
    yield tmp_path, server
    server.close()


def fetched(server):
    with urllib.request.urlopen(server.address, timeout=30) as page:
        return page.read().decode()


def grow(folder, *steps):
    line = Timeline()
    for step in steps:
        line.commit(float(step), step, [0])
    line.write(folder)


def test_it_is_the_same_page_and_grows_with_the_run(going):
    folder, server = going
    assert server.address.startswith("http://127.0.0.1:")
    text = fetched(server)
    assert "<b>5</b><span>steps of 9</span>" in text
    assert "const again" in text
    assert "broken" not in text[text.index("<header>") : text.index("</header>")], "a run that goes has not failed"
    grow(folder, 6, 7)
    deadline = time.monotonic() + 60
    while "<b>7</b><span>steps of 9</span>" not in (text := fetched(server)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "<script" not in write_page(folder).read_text(), "the file needs none"


def test_nothing_else_of_the_run_directory_is_served(going):
    _, server = going
    for path in ("token", "config.toml", "../token", "logs/group-0/rank-0.log"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.address + path, timeout=30)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_that_stays_sees_the_run_go_on(going, tmp_path_factory):
    folder, server = going
    made, asked = server.text, []

    def text():
        asked.append(len(asked))
        if len(asked) == 2:
            grow(folder, 6, 7, 8)
            server._until = 0.0
        return made()

    server.text = text
    # Its clock runs ahead while nothing is being fetched.
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path_factory.mktemp('profile')}", server.address]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert len(asked) >= 2, "it asks again"
    assert "<b>8</b><span>steps of 9</span>" in seen
