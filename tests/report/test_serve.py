"""The page while a run goes, and what may ask for it: few connections, each for a short time, under our own names."""

import http.client
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from everstep.report import serve
from everstep.report.live import Teller
from timeline import Timeline
from watched import environment, until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def going(tmp_path):
    """A run of five steps so far, and its server."""
    line = Timeline().add(0, "run_started", role="supervisor", groups=1, steps=9).start(0.5, 0)
    for step in range(1, 6):
        line.commit(float(step), step, [0])
    line.write(tmp_path)
    server = Teller(tmp_path, page=True)
    yield tmp_path, server
    server.close()


def grow(folder, *steps):
    line = Timeline()
    for step in steps:
        line.commit(float(step), step, [0])
    line.write(folder)


def test_the_file_and_what_is_served_are_the_same_page_and_grow_with_the_run(going):
    folder, server = going

    def page_says(count):
        text = urllib.request.urlopen(server.address, timeout=30).read().decode()
        return text if f'<td class="text">{count} of 9</td>' in text else ""

    assert server.address.startswith("http://127.0.0.1:")
    text = until(lambda: page_says(5), "the page")
    assert "as of" in text
    assert 'class="broken"' not in text, "a run that goes has not failed"
    grow(folder, 6, 7)
    until(lambda: page_says(7), "the page to grow")
    until(lambda: "7 of 9</td>" in (folder / "report.html").read_text(), "the file to grow")
    until((folder / "report.json").is_file, "the figures")
    server._process.kill()
    server._process.wait()
    grow(folder, 8)
    until(lambda: server.keep() or page_says(8), "another writer")


def test_the_writer_ends_with_its_launcher(tmp_path):
    Timeline().start(0, 0).commit(1, 1, [0]).write(tmp_path)
    words = "import sys, time; from pathlib import Path; from everstep.report.live import Teller\n"
    words += "print(Teller(Path(sys.argv[1]), page=True)._process.pid, flush=True); time.sleep(600)"
    launcher = subprocess.Popen([sys.executable, "-c", words, tmp_path], stdout=subprocess.PIPE, env=environment())
    writer = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    until(lambda: not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE, "the writer to end")


def is_closed(connection):
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_64_connections_that_say_nothing_or_little_hold_sixteen_at_most_and_not_for_long(monkeypatch):
    monkeypatch.setattr(serve, "CONNECTION_S", 1.5)
    listening = socket.create_server(("127.0.0.1", 0))
    serve.serve(listening, {"/"}, "text/html", lambda: b"here")
    place = listening.getsockname()
    held = [socket.create_connection(place) for _ in range(64)]
    until(lambda: sum(map(is_closed, held)) >= 48, "the others to be refused")
    slow = [connection for connection in held if not is_closed(connection)]
    assert 0 < len(slow) <= 16
    begin = time.monotonic()
    while slow and time.monotonic() < begin + 60:
        for connection in slow:
            connection.send(b"G")  # a byte now and then keeps a timeout of one read from passing
        time.sleep(0.2)
        slow = [connection for connection in slow if not is_closed(connection)]
    assert slow == []
    for connection in held:
        connection.close()
    assert urllib.request.urlopen("http://{}:{}/".format(*place), timeout=30).read() == b"here"


@pytest.fixture(scope="module")
def served():
    listening = socket.create_server(("127.0.0.1", 0))
    serve.serve(listening, {"/"}, "text/html", lambda: b"<!doctype")
    return "{}:{}".format(*listening.getsockname())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:8080", 200),
        ("[::1]:1", 200),
        (socket.gethostname(), 200),
        ("rebound.example", 403),
        ("127.0.0.1.rebound.example:80", 403),
        ("", 403),
    ],
)
def test_a_name_that_is_not_this_machines_reads_nothing(served, host, status):
    connection = http.client.HTTPConnection(served, timeout=30)
    connection.request("GET", "/", headers={"Host": host})
    answer = connection.getresponse()
    assert answer.status == status
    assert b"<!doctype" not in answer.read() or status == 200
    for path in ("token", "config.toml", "../token"):  # nothing else of a run directory is served
        connection.request("GET", f"/{path}", headers={"Host": host})
        answer = connection.getresponse()
        assert answer.status in (403, 404)
        answer.read()
    connection.close()
