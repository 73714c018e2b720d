"""A webhook server for tests."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Hook:
    """`address`: its URL. `posted`: path, content type and JSON of each request. `answer` sends the response."""

    def __init__(self):
        self.posted, self.answer = [], lambda handler: handler.send_response(200)
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
                hook.answer(self)
                self.end_headers()

            def do_GET(self):
                hook.posted.append((self.path, "", {"text": "a redirection was followed"}))

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *args: None  # no thread may print while pytest ends a test
        self.address = "http://{}:{}/T0/secret".format(*self.server.server_address)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def texts(self):
        return [body["text"] for _, _, body in self.posted]


@pytest.fixture
def hook():
    hook = Hook()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()
