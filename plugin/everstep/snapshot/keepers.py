"""Starting, finding and ending keepers, and removing segments that killed keepers left behind.

A keeper removes its segment when it ends. A killed keeper cannot, so its segment stays for the next start of its run.
If that never comes, `everstep snapshots --sweep` removes the segment. So does the next keeper of another run on the
host, once nobody has touched the segment for `keeper_ttl_s`.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep import wire
from everstep.run.events import EventLog
from everstep.run.files import is_own_directory, open_own, read_typed
from everstep.run.token import read_token
from everstep.snapshot import peers
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.peers import KeeperRecord
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import KEEPER_SILENT_S, Segment, run_id

START_TIMEOUT_S = 30.0
LOCKED_EXIT = 3
"""Exit status of a keeper whose segment is locked: by another keeper, which may be ending, or by a sweep."""


def start_keeper(run_dir: Path, group: int, host: str, settings: Snapshot, rank: int = 0) -> KeeperRecord:
    """Start this host's keeper, or find the one that already runs, and have it look after a group.

    `rank`: a rank of the group on this host. `host`: address to listen on and advertise (fault_tolerance.bind_host).
    Raises SnapshotError if the segment cannot be made, if the keeper that runs has another one, or if the keeper does
    not come up within START_TIMEOUT_S; then the message has the last line of its log. Raises OSError, UnsafeError."""
    run_dir = run_dir.resolve()
    log_file = run_dir / "logs" / f"keeper-{group}.log"
    segment, deadline = Segment.of(settings, run_id(read_token(run_dir)), group), time.monotonic() + START_TIMEOUT_S
    process = None
    while time.monotonic() < deadline:
        record = find_keeper(run_dir, group, settings)
        if record is not None and Path(record.segment).resolve() != segment.path.resolve():
            raise SnapshotError(
                f"keeper {record.pid} of the run uses {record.segment}, and snapshot.segment_dir or failure_domain now "
                f"say {segment.path}: stop the run, which writes a checkpoint and ends its keepers, then start it again"
            )
        # Again each time: a keeper that is ending may have removed the segment, and the claim in it.
        segment.create()
        segment.claim(rank)
        if record is not None:
            return record
        if process is None or process.poll() == LOCKED_EXIT:
            process = _launch_keeper(run_dir, group, host, settings, log_file)
        elif process.poll() is not None:
            break
        time.sleep(0.02)
    last_words = log_file.read_text(errors="replace").strip().splitlines()[-1:] or ["its log is empty"]
    raise SnapshotError(f"the keeper of group {group} did not start: {last_words[0]} ({log_file})")


def _launch_keeper(run_dir: Path, group: int, host: str, settings: Snapshot, log_file: Path) -> subprocess.Popen[bytes]:
    """Start a keeper process. If it ends before this process, `subprocess` reaps it when it starts the next one;
    otherwise init does."""
    order = json.dumps({"run_dir": str(run_dir), "group": group, "host": host, "settings": asdict(settings)})
    # The keeper must find this package even if this process imported it from the working directory.
    search = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with os.fdopen(open_own(log_file, os.O_APPEND), "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "everstep.snapshot.keeper", order],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        )


class KeeperWatch(threading.Thread):
    """Keeps a keeper running for a group on this host, from now until `end`. Without a keeper, training goes on.

    Args:
        host: address that the keeper listens on.
        segment: the group's segment.
        failed: called with the reason if the keeper cannot be started.
    """

    def __init__(
        self,
        run_dir: Path,
        host: str,
        settings: Snapshot,
        segment: Segment,
        events: EventLog,
        failed: Callable[[str], object],
    ) -> None:
        super().__init__(name="keeper-watch", daemon=True)
        self._run_dir, self._host, self._settings = run_dir, host, settings
        self._segment, self._events, self._failed = segment, events, failed
        self._rank = int(os.environ["RANK"])
        self.looked = threading.Event()
        """Set once the keeper is there or could not be started."""
        self._over = threading.Event()
        self.start()

    @classmethod
    def of_first(cls, *args: Any) -> "KeeperWatch | None":
        """Return a watch on the first rank of a group on this host (LOCAL_RANK 0), None on the other ranks."""
        return cls(*args) if int(os.environ.get("LOCAL_RANK", "0")) == 0 else None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._start_keeper()
                self.looked.set()
                while not self._over.wait(KEEPER_SILENT_S) and not self._segment.read_notes(self._rank).is_silent:
                    self._segment.ring()  # the keeper is still needed, even if nothing is published
        finally:
            self.looked.set()

    def _start_keeper(self) -> None:
        try:
            record = start_keeper(self._run_dir, self._segment.group, self._host, self._settings, self._rank)
            own = f"/group-{record.group}" if self._settings.failure_domain == "group" else ""
            self._events.emit("keeper_found", pid=record.pid, address=record.address, host=record.host + own)
        except (SnapshotError, OSError, ValueError) as error:  # ValueError: others can read the token
            self._failed(str(error))

    def end(self) -> None:
        """Start no more keepers, and wait up to 10 s for one that is being started."""
        self._over.set()
        self.join(10.0)


def find_keeper(run_dir: Path, group: int, settings: Snapshot) -> KeeperRecord | None:
    """Return this host's keeper of a group if it is alive and answers; else None."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, wire.WireError):
        token = read_token(run_dir)
        record = read_typed(KeeperRecord, peers.record_file(run_dir, group))
        if record is None:
            return None
        timeout = timedelta(seconds=settings.transfer_timeout_s)
        answer = peers.ask(record.address, token, {"op": "ping"}, timeout)
        if group in answer["groups"] and answer["pid"] == record.pid:
            return record
    return None


def end_keepers(run_dir: Path, timeout: timedelta = timedelta(seconds=5)) -> None:
    """Tell every keeper of a run that is over to remove its segment and end. `timeout`: longest silence of a keeper. A
    keeper that cannot be reached ends by itself after keeper_ttl_s."""
    records = list({record.address: record for record in peers.read_records(run_dir)}.values())
    peers.ask_all(records, read_token(run_dir), {"op": "end"}, 3 * timeout)


ALIVE_S = 60.0
"""Seconds. A segment that a trainer has touched this recently belongs to a live run, even if its keeper died."""
_SEGMENT = re.compile(r"everstep-([0-9a-f]{16})(-group-\d+)?")


def sweep(directory: Path, spared_s: float = ALIVE_S, spare: str = "") -> list[str]:
    """Remove this user's segments that have no living keeper and were not touched for `spared_s` seconds, except those
    of the run `spare`. Returns a sentence for each removed segment."""
    said = []
    for path in sorted(directory.glob("everstep-*")):
        match = _SEGMENT.fullmatch(path.name)
        with contextlib.suppress(OSError):  # it has a keeper, or is being removed
            if match is None or match.group(1) == spare or not is_own_directory(path):
                continue
            files = [path.lstat(), *(file.lstat() for file in path.iterdir())]
            age_s = time.time() - max(file.st_mtime for file in files)
            if age_s < spared_s:
                continue
            with os.fdopen(take_lock(path), "rb"):
                shutil.rmtree(path, ignore_errors=True)
            megabytes = sum(file.st_blocks * 512 for file in files) / 1e6
            said.append(f"removed {path}: {megabytes:.1f} MB, not written to for {age_s:.0f} s")
    return said


def take_lock(segment: Path) -> int:
    """Lock a segment, as its keeper does, until the returned file descriptor is closed. Raises BlockingIOError if
    another process holds the lock, or OSError."""
    fd = os.open(segment / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
