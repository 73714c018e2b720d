"""The HTTP servers of a run: its page while it goes, and its figures for Prometheus.

Both serve from inside the launcher, which must keep its descriptors and its time. So another process makes the page; a
server takes MOST_CONNECTIONS at once, none for longer than CONNECTION_S. A request is answered only under a name of
this machine, so that a web page that resolves its own name to this address (DNS rebinding) reads nothing.
"""

import ipaddress
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from everstep.run.regular import read_regular

MOST_CONNECTIONS = 16
CONNECTION_S = 10.0
LARGEST_PAGE = 256 << 20
CLOSE_S = 20.0
"""How long the last writing of the page may take."""

NO_PAGE_YET = b'<!doctype html><meta http-equiv="refresh" content="1"><p>The page is being made.'

Document = tuple[str, bytes]
"""Its content type and its bytes."""


class Server:
    """Serves documents by path, in threads of its own, until `close`.

    Raises OSError when the port is taken. `port` 0: one that is free.
    """

    def __init__(self, host: str, port: int, documents: Mapping[str, Callable[[], Document]]):
        self.documents = dict(documents)
        served = self.documents
        names = {host.lower(), "localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

        class Handler(BaseHTTPRequestHandler):
            timeout = CONNECTION_S

            def do_GET(self) -> None:
                if not is_ours(self.headers.get("Host", ""), names):
                    self.send_error(403, f"ask for this machine as {host} or localhost")
                elif (make := served.get(self.path.split("?")[0])) is None:
                    self.send_error(404)
                else:
                    kind, data = make()
                    self.send_response(200)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(data)))
                    self.send_header("Cache-Control", "no-store")
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = _Bounded((host, port), Handler)
        bound = self._server.server_address
        self.address = f"http://{bound[0]}:{bound[1]}/"
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def is_ours(host: str, names: set[str]) -> bool:
    """Whether a Host header names this machine: an address, or one of `names`, with any port or none."""
    name = host.strip().lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


class _Bounded(ThreadingHTTPServer):
    """A server with few connections, each of which ends in time."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        self._open: dict[Any, float] = {}
        """Connections, and when each has to end, on the monotonic clock."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                return False
            self._open[request] = time.monotonic() + CONNECTION_S
            return True

    def service_actions(self) -> None:
        """Called every half second: end the connections that took too long, however slowly they still send."""
        with self._lock:
            late = [request for request, until in self._open.items() if time.monotonic() > until]
        for request in late:
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has just ended
                continue

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is nobody's business."""


class PageServer:
    """Has another process keep RUN_DIR's report.html and report.json up to date, and serves the page on loopback, until
    `close`. That process ends with this one; if it dies, it is started again when somebody asks for the page."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._writer = self._start()
        self._server = Server("127.0.0.1", 0, {"/": self._page, "/report.html": self._page})
        self.address = self._server.address

    def _start(self) -> subprocess.Popen[bytes]:
        search = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-m", "everstep.report.page", str(self._run_dir)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        )

    def _page(self) -> Document:
        if self._writer.poll() is not None:
            self._writer = self._start()
        try:
            return "text/html; charset=utf-8", read_regular(self._run_dir / "report.html", LARGEST_PAGE)
        except OSError:
            return "text/html; charset=utf-8", NO_PAGE_YET

    def close(self) -> None:
        self._server.close()
        assert self._writer.stdin is not None
        self._writer.stdin.close()
        try:
            self._writer.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._writer.kill()
            self._writer.wait()
