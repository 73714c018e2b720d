"""Shows a run while it goes: its page, a Prometheus endpoint, TensorBoard, W&B and a webhook.

    python -m everstep.report.live RUN_DIR

is the one process that makes and serves all of these, from the run's events alone. A process that exists for the whole
run starts it and writes the settings to its stdin: the launcher, or on Slurm the lighthouse's job. Trainers neither
serve this process nor wait for it.
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.config.sections import FaultTolerance
from everstep.report.serve import serve
from everstep.run import typed
from everstep.run.output import keep_on_without_output

LOOK_S = 2.0
CLOSE_S = 20
"""Seconds that the process has at the end for its last writes, also if its launcher was killed."""
PAUSE_S, POLL_S = 2.0, 0.5
SHARE = 0.5
"""Largest share of one core that rewriting the page may take."""
TYPES = {"page": "text/html; charset=utf-8", "metrics": "text/plain; version=0.0.4; charset=utf-8"}


class Teller:
    """Keeps the process of this module running, from construction to `close`.

    The process ends with this one. If it dies earlier, `keep` starts it again; the sockets are opened here, so that
    their addresses stay the same. While the port of the figures is taken, the run goes on without them.

    Args:
        host: Address at which to serve figures for Prometheus.
        ft: The run's [fault_tolerance] section, with the port of the figures and the webhook's address.
        metrics: torchtitan's [metrics] section, which says which curves are written.
        page: Whether to write the page, and to serve it on loopback.

    Attributes:
        address: URL of the page; "" without one.
    """

    def __init__(
        self, run_dir: Path, host: str, ft: FaultTolerance, metrics: Mapping[str, Any], page: bool = False
    ) -> None:
        self.address = ""
        self._next_look = 0.0
        self._sockets: dict[str, socket.socket] = {}
        if page:
            self._sockets["page"] = socket.create_server(("127.0.0.1", 0))
            self.address = "http://{}:{}/".format(*self._sockets["page"].getsockname())
        self._figures_at = (host, ft.metrics_port)
        try:
            self._open_figures()
        except OSError as error:
            print(f"everstep: no metrics on {host}:{ft.metrics_port} (fault_tolerance.metrics_port) yet: {error}")
        self._asked = {"ft": asdict(ft), "metrics": dict(metrics)}
        self._run_dir = run_dir
        self._process = self._start()

    def _open_figures(self) -> bool:
        """Open the port of the figures if it is wanted and not open. Return whether it was opened now. Raises OSError
        if it is taken, for instance by the process of a launcher that was killed."""
        if "metrics" in self._sockets or not self._figures_at[1]:
            return False
        self._sockets["metrics"] = socket.create_server(self._figures_at)
        return True

    def _start(self) -> subprocess.Popen[bytes]:
        fds = {name: one.fileno() for name, one in self._sockets.items()}
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._run_dir)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[one.fileno() for one in self._sockets.values()],
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; `keep` will see it
            process.stdin.write(json.dumps(self._asked | {"fds": fds}).encode() + b"\n")
            process.stdin.flush()
        return process

    def keep(self) -> None:
        """Restart the process if it has ended; checks at most every LOOK_S. Raises OSError if it cannot be started."""
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            with contextlib.suppress(OSError):  # it is still taken
                if self._open_figures():
                    self._process.kill()  # the next one has the port
            if self._process.poll() is not None:
                self._process = self._start()

    def close(self) -> None:
        """Let the process write its last page and end. Kills it if that takes longer than CLOSE_S."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for one in self._sockets.values():
            one.close()


def tell(run_dir: Path, ft: FaultTolerance, metrics: Mapping[str, Any], fds: Mapping[str, int]) -> None:
    """Show a run, as its config asks, until stdin ends.

    Events are read once. Curves begin with the run's newest start, as those of earlier starts are drawn already. On
    Slurm they begin with the run's first step, as the run goes on while this process is away.

    Args:
        fds: "page" and "metrics" -> file descriptor of the listening socket, if it is wanted.
    """
    from everstep.report.account import Account
    from everstep.report.curves import Curves, scalars_of
    from everstep.report.metrics import prometheus_text
    from everstep.report.notify import Webhook
    from everstep.report.page import report_of, write_pages
    from everstep.report.troubles import shortage
    from everstep.run.events import EventTail, event_path, last_event

    now, curves, hook = Account(), Curves(run_dir, metrics), Webhook(ft.notify) if ft.notify else None
    served = {"page": report_of(run_dir, account=now)[0], "metrics": b""}

    def say(sentences: Iterable[str]) -> None:
        if hook is not None:
            for sentence in sentences:
                hook.put(f"{run_dir.resolve().name}: {sentence}")

    def write() -> None:
        """Write the page, if it is wanted and the run directory was not removed."""
        try:
            if "page" in fds:
                served["page"], figures = report_of(run_dir, account=now)
                if (run_dir / "events").exists():
                    write_pages(run_dir, served["page"], figures)
        except OSError as error:  # a full disk, to which no event can be written either
            sentences = now.take(shortage(run_dir, str(error.strerror), pause_s))
            print(*(f"everstep: {sentence}\n" for sentence in sentences), sep="", end="", flush=True)
            say(sentences)

    for name, fd in fds.items():
        paths = {"/", f"/{name}", "/report.html"}
        serve(socket.socket(fileno=fd), paths, TYPES[name], functools.partial(served.__getitem__, name))
    ends = threading.Event()

    def await_end() -> None:
        """Wait until stdin ends, also while a long log is read. Then the kernel limits the rest to CLOSE_S."""
        select.select([0], [], [])
        signal.alarm(CLOSE_S)
        ends.set()

    threading.Thread(target=await_end, daemon=True).start()
    tail, over, due, first, pause_s = EventTail(run_dir), False, time.monotonic(), True, PAUSE_S
    begun = last_event(event_path(run_dir, None, None, "supervisor"), {"run_started"})
    since = begun["t"] if begun else 0.0
    progress, progress_t = None, 0.0
    while not over:
        over = ends.wait(POLL_S)
        said = []
        for event in tail.past() if first else tail.new():
            before = now.newest
            said += now.take(event)
            if event["t"] >= since and (event["kind"] == "validation" or now.newest is not before):
                curves.put(event["step"], event["t"], scalars_of(event))
        say(now.troubles.sentences if first else said)  # not those that were over before this process began
        if progress != (progress := (now.newest, len(now.sessions))):
            logged_t = max(now.current.begin, now.newest.t if now.newest else 0.0)
            progress_t = min(logged_t, time.time()) if first else time.time()
        first = False
        if "metrics" in fds:
            served["metrics"] = prometheus_text(now, ft.min_groups, progress_t)
        if not over and time.monotonic() >= due:
            began = time.process_time()
            write()
            pause_s = max(PAUSE_S, (time.process_time() - began) / SHARE)
            due = time.monotonic() + pause_s
    write()
    for outlet in filter(None, (hook, curves)):
        outlet.close()


if __name__ == "__main__":
    keep_on_without_output()
    asked = json.loads(sys.stdin.readline())
    tell(Path(sys.argv[1]), typed.parse(FaultTolerance, asked.pop("ft")), **asked)
    os._exit(0)  # a thread that waits for a server may not end
