"""Posts each trouble to a webhook when it begins, but not its end, as the JSON that Slack takes: {"text": …}."""

import json
import threading
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

TIMEOUT_S = 5.0
"""Seconds for a whole attempt, however often the server sends a byte."""
TRIES = 2
MOST_TRYING = 8
"""Attempts that may go on after TIMEOUT_S, each in a thread, as long as the server sends a byte now and then."""
MOST_WAITING = 1000
"""Texts that may wait for the server. Further ones are not sent."""
CLOSE_S = 8.0
"""Seconds for which `Webhook.close` waits for the server."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: the address is a secret, meant for that server alone."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class Webhook:
    """Posts texts to `address` one by one, in a thread, so that neither the run nor its page waits."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._thread = ThreadPoolExecutor(1)
        self._posts: dict[Future[None], str] = {}
        """Posts that were under way at the last `put`, and their texts."""
        self._trying: list[threading.Thread] = []

    def put(self, text: str) -> None:
        """Post a text after those before it."""
        self._posts = {post: said for post, said in self._posts.items() if not post.done()}
        if len(self._posts) >= MOST_WAITING:
            self._lose(text, f"{MOST_WAITING} wait before it")
            return
        self._posts[self._thread.submit(self._post, text)] = text

    def close(self) -> None:
        """Post what is left, for CLOSE_S at most."""
        late = wait(self._posts, CLOSE_S).not_done
        self._thread.shutdown(wait=False, cancel_futures=True)
        for post, text in self._posts.items():
            if post in late:
                self._lose(text, "the run ended first")

    def _post(self, text: str) -> None:
        data = json.dumps({"text": text}).encode()
        reason = ""
        for _ in range(TRIES):
            answer: Future[None] = Future()
            self._trying = [thread for thread in self._trying if thread.is_alive()]
            if len(self._trying) >= MOST_TRYING:
                reason = f"{MOST_TRYING} earlier attempts have no end"
                break
            try:
                self._trying.append(threading.Thread(target=self._try, args=(data, answer), daemon=True))
                self._trying[-1].start()
                answer.result(TIMEOUT_S)
                return
            except Exception as error:  # noqa: BLE001  a bad address, a network: anything
                reason = f"{type(error).__name__}: {getattr(error, 'reason', error)}".rstrip(": ")
        self._lose(text, reason)

    def _try(self, data: bytes, answer: Future[None]) -> None:
        """Post `data` once. The timeout of a socket begins anew with each byte, so the caller has one of its own."""
        try:
            request = urllib.request.Request(self._address, data, {"Content-Type": "application/json"})
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
                answer.set_result(None)
        except Exception as error:  # noqa: BLE001
            answer.set_exception(error)

    def _lose(self, text: str, reason: str) -> None:
        print(f"everstep: fault_tolerance.notify: not sent ({reason}): {text}", flush=True)
