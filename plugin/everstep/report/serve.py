"""A small HTTP server for the page of a run and for its figures.

It takes MOST_CONNECTIONS at once, and ends one that is silent for SILENT_S. When there is no room for another one, it
also ends those that are older than that. It answers only requests whose Host header names this machine, so a web page
that points its own domain at this address (DNS rebinding) can read nothing.
"""

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Set
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_CONNECTIONS = 16
SILENT_S = 10.0


def serve(listening: socket.socket, paths: Set[str], kind: str, document: Callable[[], bytes]) -> None:
    """Serve one document under some paths from a thread, on a listening socket, as long as this process lives. `kind`:
    its content type. `document` is called for each request; as long as it is empty, the answer is 503."""
    host = listening.getsockname()[0]

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_S

        def do_GET(self) -> None:
            if not is_ours(self.headers.get("Host", "")):
                self.send_error(403, f"use {host} or localhost as the host in the address")
            elif self.path.split("?")[0] not in paths:
                self.send_error(404)
            else:
                data = document()
                self.send_response(200 if data else 503)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            return

    threading.Thread(target=Bounded(listening, Handler).serve_forever, name="serve", daemon=True).start()


def is_ours(host: str) -> bool:
    """Whether a Host header names this machine: an address, `localhost` or its own name, with or without a port. A name
    server that does not answer holds up only the thread of this connection."""
    name = host.strip().lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", socket.gethostname().lower()) or name == socket.getfqdn().lower()
    return True


class Bounded(ThreadingHTTPServer):
    """A server with a bounded number of connections."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]):
        self._open: dict[Any, float] = {}
        """Open connection -> monotonic time of its beginning."""
        super().__init__(listening.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening

    def verify_request(self, request: Any, client_address: Any) -> bool:
        now = time.monotonic()
        if len(self._open) >= MOST_CONNECTIONS:
            for other in [other for other, begin in [*self._open.items()] if now - begin > SILENT_S]:
                self._open.pop(other, None)
                with contextlib.suppress(OSError):  # it has ended
                    other.shutdown(socket.SHUT_RDWR)
        if len(self._open) >= MOST_CONNECTIONS:
            return False
        self._open[request] = now
        return True

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a client that disconnects is no problem of the run."""
