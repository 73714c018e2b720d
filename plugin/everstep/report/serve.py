"""The page of a run while it goes: the same as report.html, served from its events and fetched again by itself.

Rendering takes longer the longer the run is, so a page is kept for a while, and never made twice at once.
"""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEPT_S = 2.0
SHARE = 0.1
"""Of one core that rendering may take: a page that took a second is kept for ten."""


class PageServer:
    """Serves RUN_DIR's page on a port of loopback until `close`."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._text, self._until = b"", 0.0
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/", "/report.html"):
                    self.send_error(404)
                    return
                text = pages.text()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()

    def text(self) -> bytes:
        """The page, no older than KEPT_S or than it takes to make one ten times over."""
        from everstep.report.page import render  # matplotlib with it, which takes a while once

        with self._lock:
            if time.monotonic() >= self._until:
                begin = time.monotonic()
                self._text = render(self._run_dir, live=True).encode()
                took_s = time.monotonic() - begin
                self._until = time.monotonic() + max(KEPT_S, took_s / SHARE)
            return self._text

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
