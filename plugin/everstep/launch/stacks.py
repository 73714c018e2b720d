"""Why workers hang: before a stalled group is killed, every rank writes where it is, and one event says it in a line.

A worker answers SIGUSR2 with the stacks of its threads (faulthandler, which needs neither the GIL nor a thread that
runs) in `logs/group-K/rank-R.stacks`.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

SIGNAL = signal.SIGUSR2
WAIT_S = 2.0
"""For the stacks of all ranks. A rank that is stopped gives none."""

_COLLECTIVE = re.compile(
    r"(all_?(reduce|gather|to_all)|reduce_scatter|broadcast)\w*"
    r"|(monitored_)?barrier|gather|reduce|recv|send|scatter|wait_tensor|synchronize"
)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$')


def stacks_path(run_dir: Path, group: int, rank: int) -> Path:
    """Where a rank's stacks are, of all its stalls, the newest last."""
    return Path(run_dir) / "logs" / f"group-{group}" / f"rank-{rank}.stacks"


def listen(run_dir: Path, group: int, rank: int) -> TextIO:
    """From now on SIGUSR2 makes this process write its stacks. Returns the file, to be kept open."""
    path = stacks_path(run_dir, group, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")  # a worker that starts again keeps what says why
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    return file


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    collective: str
    """The collective that it waits for; "" if it is in none."""
    where: str
    """`file:line function` of the innermost frame of ours, or of the innermost one."""
    state: str = ""
    """Why there is no stack: "stopped" for instance."""

    def __str__(self) -> str:
        if self.state:
            return f"rank {self.rank} is {self.state}"
        return f"rank {self.rank} {f'waits for {self.collective}' if self.collective else 'is'} in {self.where}"


def collect(run_dir: Path, group: int, pids: Mapping[int, int], wait_s: float = WAIT_S) -> list[Place]:
    """Ask all ranks (`pids` by rank) where they are. Takes `wait_s` at most, and less when all answer."""
    before = {}
    for rank, pid in pids.items():
        path = stacks_path(run_dir, group, rank)
        before[rank] = path.stat().st_size if path.exists() else 0
        with contextlib.suppress(OSError):
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + wait_s
    texts: dict[int, str] = {}
    sizes = dict(before)
    while len(texts) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank in pids.keys() - texts.keys():
            path = stacks_path(run_dir, group, rank)
            size = path.stat().st_size if path.exists() else 0
            if before[rank] < size == sizes[rank]:  # it has stopped growing
                text = path.read_bytes()[before[rank] :].decode(errors="replace")
                if "Current thread" in text:  # written last
                    texts[rank] = text
            sizes[rank] = size
    return [
        place_of(rank, texts[rank]) if rank in texts else Place(rank, "", "", _state(pid))
        for rank, pid in sorted(pids.items())
    ]


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    words = {psutil.STATUS_STOPPED: "stopped (SIGSTOP)", psutil.STATUS_DISK_SLEEP: "stuck in the kernel"}
    words[psutil.STATUS_ZOMBIE] = "gone"
    return words.get(status, f"silent ({status})")


def place_of(rank: int, text: str) -> Place:
    """Where the main thread is, in faulthandler's text of a process: the newest thread stands first there, and any may
    be the one that took the signal."""
    _, _, stack = text.rpartition("hread 0x")
    frames = [found for line in stack.splitlines() if (found := _FRAME.match(line))]
    collective = next((found["name"] for found in frames if _COLLECTIVE.fullmatch(found["name"])), "")
    ours = [found for found in frames if "/everstep/" in found["file"] and "/everstep/launch/" not in found["file"]]
    chosen = ours[0] if ours else frames[0] if frames else None
    if chosen is None:
        return Place(rank, collective, "no Python code")
    file = chosen["file"].rpartition("/everstep/")[2] if ours else "/".join(chosen["file"].split("/")[-2:])
    return Place(rank, collective, f"{file}:{chosen['line']} {chosen['name']}")


def summary(places: list[Place]) -> str:
    """Who waits for what: ranks at one place are told together."""
    told: dict[str, list[int]] = {}
    for place in places:
        told.setdefault(str(place).partition(" ")[2].partition(" ")[2], []).append(place.rank)
    return "; ".join(f"{ranks_in_words(ranks)} {what}" for what, ranks in told.items())


def ranks_in_words(ranks: list[int]) -> str:
    """rank 3; ranks 0, 1, 2."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
