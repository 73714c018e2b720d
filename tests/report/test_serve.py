"""What may ask for a page or figures: few connections, each for a short time, under names of this machine."""

import http.client
import socket
import threading
import time
import urllib.request

import pytest

from everstep.report import serve
from watched import until


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


def test_a_server_of_names_that_does_not_answer_holds_nothing_up(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(serve.socket, "getfqdn", lambda: answers.wait(30) and "Node7.example")
    listening = socket.create_server(("127.0.0.1", 0))
    begin = time.monotonic()
    serve.serve(listening, {"/"}, "text/html", lambda: b"here")
    place = "{}:{}".format(*listening.getsockname())
    assert urllib.request.urlopen(f"http://{place}/", timeout=10).read() == b"here"
    assert time.monotonic() - begin < 20
    answers.set()

    def by_name():
        connection = http.client.HTTPConnection(place, timeout=30)
        connection.request("GET", "/", headers={"Host": "node7.example"})
        return connection.getresponse().status == 200

    until(by_name, "its name")


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
