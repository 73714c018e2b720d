"""What is told of a run while it goes: its page, a Prometheus endpoint, TensorBoard, W&B and a webhook.

All of it is made and served by one process (`everstep.report.page`), which reads the run's events. It is started by
whoever is there for the whole run: the launcher, or on a cluster the lighthouse's job. No trainer is asked, and none
waits for it. The sockets are opened here, so that their addresses stay when that process dies and is started again.
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

LOOK_S = 2.0
CLOSE_S = 20.0
"""How long the last writing of the page may take."""


@dataclass(frozen=True)
class Telling:
    """What is wanted. `port` 0: no endpoint."""

    run_dir: Path
    groups: int = 1
    min_groups: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    tensorboard: bool = False
    tensorboard_folder: str = "tb"
    wandb: bool = False
    page: bool = False
    notify: bool = False
    """Whether the config names a webhook. Its address is a secret, and the words of a command are not."""

    since: float = field(default_factory=time.time)
    """Wall time in seconds: curves begin here, as those of earlier starts are drawn already."""

    @property
    def anything(self) -> bool:
        return bool(self.port or self.tensorboard or self.wandb or self.page or self.notify)


class Teller:
    """Begins when it is made; `close` has what is left written. The process ends with this one; if it dies before,
    `keep` starts it again. A port that is taken costs the run its figures and nothing else.

    Attributes:
        address: of the page, on loopback; "" without one.
    """

    def __init__(self, what: Telling) -> None:
        self.address = ""
        self._next_look = 0.0
        self._sockets: dict[str, socket.socket] = {}
        self._process: subprocess.Popen[bytes] | None = None
        if what.page:
            self._sockets["page"] = socket.create_server(("127.0.0.1", 0))
            self.address = "http://{}:{}/".format(*self._sockets["page"].getsockname())
        if what.port:
            try:
                self._sockets["metrics"] = socket.create_server((what.host, what.port))
            except OSError as error:
                print(f"everstep: no figures on {what.host}:{what.port} (fault_tolerance.metrics_port): {error}")
        if what.anything:
            self._words = [str(what.run_dir), json.dumps(asdict(what) | {"fds": self._fds()}, default=str)]
            self._process = self._start()

    def _fds(self) -> dict[str, int]:
        return {name: one.fileno() for name, one in self._sockets.items()}

    def _start(self) -> subprocess.Popen[bytes]:
        search = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-m", "everstep.report.page", *self._words],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=list(self._fds().values()),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        )

    def keep(self) -> None:
        """To be called now and then. Raises OSError if there is no room for a process."""
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            if self._process is not None and self._process.poll() is not None:
                self._process = self._start()

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for one in self._sockets.values():
            one.close()
