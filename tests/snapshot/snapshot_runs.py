"""A real run with snapshots, started as a person starts it and killed as a whole."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from everstep.run.events import read_events
from everstep.snapshot import peers

STEPS = 14
CONFIG = """
[job]
module = "llama3"
config = "llama3_debugmodel"
[training]
steps = 14
seq_len = 64
local_batch_size = 1
global_batch_size = 6
disable_cuda_graphs = true
[optimizer]
lr = 8e-4
implementation = "foreach"
[lr_scheduler]
warmup_steps = 5
[activation_checkpoint]
mode = "none"
[data]
source = "stdlib"
[fault_tolerance]
enable = true
groups = 3
heartbeat_timeout_s = 1.0
reduce_timeout_s = 20.0
quorum_timeout_s = 60.0
[snapshot]
enable = true
failure_domain = "group"
[debug]
seed = 0
"""


class Run:
    """`everstep run` as a person starts it, in a session of its own."""

    def __init__(self, home: Path, name: str, flags: list[str]) -> None:
        self.dir, self.flags = home / name, flags
        self._config = home / "config.toml"
        self._config.write_text(CONFIG)
        self._log = home / f"{name}.log"

    def start(self) -> None:
        command = [sys.executable, "-m", "everstep.cli", "run", str(self._config), "--run-dir", str(self.dir)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.flags], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def commits(self) -> dict[int, dict]:
        """The last word on each step, whichever group says it: one that starts late misses the first steps."""
        if not self.dir.exists():
            return {}
        return {e["step"]: e for e in read_events(self.dir) if e["kind"] == "commit"}

    def console(self) -> str:
        """What `everstep run` has printed."""
        return self._log.read_text()

    def says(self, command: str) -> str:
        """What another command of everstep prints of this run."""
        words = [sys.executable, "-m", "everstep.cli", command, str(self.dir)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def until(self, step: int) -> None:
        while max(self.commits(), default=0) < step:
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            time.sleep(0.05)

    def kill_all_but_keepers(self) -> None:
        """Launcher, agents, lighthouse, trainers: SIGKILL, all at once."""
        everything = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line
                if "everstep.snapshot.keeper" not in process.cmdline():
                    process.kill()
        self.process.wait()

    def places(self) -> list[peers.Place]:
        return peers.read_places(self.dir)

    def lose_hosts(self, count: int) -> None:
        for place in self.places()[:count]:
            os.kill(place.pid, signal.SIGKILL)
            shutil.rmtree(place.segment)

    def events(self, kind: str) -> list[dict]:
        return [e for e in read_events(self.dir) if e["kind"] == kind]

    def recoveries(self) -> list[dict]:
        return [e for e in read_events(self.dir) if e["kind"] == "recovery" and e["restored_step"] > 0]


def end(run: Run) -> None:
    """Leave nothing behind, also after a failure."""
    if run.process.poll() is None:
        run.kill_all_but_keepers()
    for file in peers.places_dir(run.dir).glob("*.json") if run.dir.exists() else ():
        place = peers.Place(**json.loads(file.read_text()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.pid, signal.SIGKILL)
        shutil.rmtree(place.segment, ignore_errors=True)
