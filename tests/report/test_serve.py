"""Tests of the server of page and figures: few connections, each for a short time, under names of this machine."""

import contextlib
import http.client
import socket

import pytest

from everstep.report import serve
from watched import until


def served():
    """Start a server of one page. Return its host and port."""
    listening = socket.create_server(("127.0.0.1", 0))
    serve.serve(listening, {"/"}, "text/html", lambda: b"<!doctype")
    return listening.getsockname()


def get(place, host="localhost", path="/"):
    """Return status and content of an answer."""
    connection = http.client.HTTPConnection(*place, timeout=30)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read()


def is_closed(connection):
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_64_connections_that_say_nothing_hold_sixteen_at_most_and_not_for_long(monkeypatch):
    monkeypatch.setattr(serve, "SILENT_S", 1.5)
    place = served()
    held = [socket.create_connection(place) for _ in range(64)]
    until(lambda: sum(map(is_closed, held)) >= 48, "the others to be refused")
    assert not all(map(is_closed, held))
    until(lambda: all(map(is_closed, held)), "the silent ones to be ended")
    for connection in held:
        connection.close()
    assert get(place) == (200, b"<!doctype")


def test_sixteen_that_send_a_byte_now_and_then_keep_others_out_for_a_while_only(monkeypatch):
    monkeypatch.setattr(serve, "SILENT_S", 1.5)
    place = served()
    held = [socket.create_connection(place) for _ in range(16)]

    def is_answered():
        for connection in held:
            with contextlib.suppress(OSError):
                connection.send(b"a")
        with contextlib.suppress(OSError, http.client.HTTPException):
            return get(place)[0] == 200

    assert not is_answered()
    until(is_answered, "a request beside them to be answered", 10.0)


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1", 200), ("localhost:8080", 200), ("[::1]:1", 200), (socket.gethostname(), 200),
    ("node7.example:80", 200), ("rebound.example", 403), ("127.0.0.1.rebound.example:80", 403), ("", 403),
])  # fmt: skip
def test_a_name_that_is_not_this_machines_reads_nothing(host, status, monkeypatch):
    monkeypatch.setattr(serve.socket, "getfqdn", lambda: "Node7.example")
    place = served()
    found, content = get(place, host)
    assert (found, b"<!doctype" in content) == (status, status == 200)
    for path in ("/token", "/config.toml", "/../token"):  # no other file of a run directory is served
        assert get(place, host, path)[0] in (403, 404)
