"""Workers' own states in hosts' memory (semi-synchronous training): files in the segment, which outlive the trainer
that wrote them, and which a host's keeper serves to the others."""

import contextlib
import mmap
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from everstep import wire
from everstep.run.regular import open_regular
from everstep.run.token import read_token
from everstep.snapshot import peers
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.segment import Segment

NAME = re.compile(r"worker-\d{1,9}\.rank-\d{1,9}\.round-\d{1,18}\.[0-9a-f]{1,16}")
LOOK_S = 0.5
"""Between two looks at other hosts for one that they do not have, and the longest that a look waits for them."""
TIMEOUT = timedelta(seconds=10)
"""The longest silence of a keeper that serves one."""


@contextlib.contextmanager
def opened(folder: Path, name: str) -> Iterator[wire.Bytes | None]:
    """A state that is served from a segment; None if there is none of this name."""
    if not NAME.fullmatch(name):
        raise wire.RefusedError(f"'{name[:100]}' is no worker's state")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(folder / name, links=False))
            held = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError):  # an empty file cannot be mapped
            yield None
        else:
            yield wire.Pieces([held])


class WorkerStates:
    """See `everstep.semi.worker_store.Memory`.

    Args:
        run_dir: of the run.
        segment: of a group on this host.
    """

    def __init__(self, run_dir: Path, segment: Segment) -> None:
        self.folder = segment.path
        with contextlib.suppress(SnapshotError):  # nothing is kept there then; whoever starts the keeper says why
            segment.create()
        self._run_dir, self._token = run_dir, read_token(run_dir)
        self._holder: dict[str, str] = {}
        """By name of a state the keeper that has it."""
        self._looked = "", 0.0
        """For which state, and when."""

    def elsewhere(self, name: str, size: int) -> bool:
        looked_for, looked_mono = self._looked
        if name not in self._holder and (name != looked_for or time.monotonic() - looked_mono > LOOK_S):
            places = {place.address: place for place in peers.read_places(self._run_dir)}
            here = socket.gethostname(), str(self.folder)  # a segment has the same path on every host
            others = [place for place in places.values() if (place.host, place.segment) != here]
            answers, _ = peers.ask_all(others, self._token, {"op": "worker", "name": name}, timedelta(seconds=LOOK_S))
            found = [place.address for place, answer in answers.items() if answer.get("size") == size]
            self._holder = dict.fromkeys([name], found[0]) if found else {}
            self._looked = name, time.monotonic()
        return name in self._holder

    def fetch(self, name: str, size: int) -> bytes | None:
        if not self.elsewhere(name, size):
            return None
        try:
            with contextlib.closing(wire.connect(self._holder.pop(name), self._token, TIMEOUT)) as channel:
                if channel.ask({"op": "worker", "name": name}).get("size") != size:
                    return None
                found = bytearray(size)
                wire.pull(channel, wire.Pieces([memoryview(found)]))
        except wire.WireError:
            return None
        return bytes(found)
