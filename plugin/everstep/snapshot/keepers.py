"""Starting, finding and ending keepers, for trainers, which they outlive; and giving back what is left behind.

A keeper removes its segment when it ends. One that was killed cannot; then the segment stays for the next start of its
run. If there never is one, `everstep snapshots --sweep` removes it, or the next keeper of another run on the host, once
the run directory is gone or nobody has touched the segment for longer than `keeper_ttl_s`.
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from everstep import wire
from everstep.run.files import read_json, write_json
from everstep.run.token import read_token
from everstep.snapshot import peers
from everstep.snapshot.peers import Place
from everstep.snapshot.room import is_own_directory
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id

START_TIMEOUT_S = 30.0
LOCKED_EXIT = 3
"""Status of a keeper that found another of its run, group and host."""


class KeeperError(RuntimeError):
    """A keeper that could not be started; the message says why."""


def start_keeper(
    run_dir: Path, group: int, host: str, settings: Snapshot, encrypt: bool = False, rank: int = 0
) -> Place:
    """Start this host's keeper, or find the one that is already there, and have it look after a group.

    `rank`: one of the group that runs here. `host`: address to listen on and advertise (fault_tolerance.bind_host).
    `encrypt`: fault_tolerance.encrypt; a keeper that is already there stays as it was started.

    Raises:
        KeeperError: it did not come up; the message has its last words.
    """
    run_dir = run_dir.resolve()
    place = find_keeper(run_dir, group, settings)
    if place is not None:
        return place
    segment = Segment.of(settings, run_id(read_token(run_dir)), group)
    segment.create()
    if not any(watched == group for watched, _ in segment.columns()):
        segment.set_mark(rank)
    log_file = run_dir / "logs" / f"keeper-{group}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    order = json.dumps(
        {"run_dir": str(run_dir), "group": group, "host": host, "settings": asdict(settings), "encrypt": encrypt}
    )
    # The keeper must find this package the way we did, also where that was the working directory.
    search = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log_file.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "everstep.snapshot.keeper", order],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        )
    # Reaps it should it end while we live; a keeper that outlives us is init's.
    threading.Thread(target=process.wait, name="keeper-reaper", daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        place = find_keeper(run_dir, group, settings)
        if place is not None:
            return place
        if process.poll() not in (None, LOCKED_EXIT):
            break
        time.sleep(0.02)
    last_words = log_file.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    raise KeeperError(f"the keeper of group {group} did not come up: {last_words[0]} ({log_file})")


def find_keeper(run_dir: Path, group: int, settings: Snapshot) -> Place | None:
    """This host's keeper of a group, if it is alive and answers."""
    with contextlib.suppress(OSError, ValueError, TypeError, wire.WireError):
        token = read_token(run_dir)
        place = peers.read_place(peers.place_file(run_dir, group))
        if place is None:
            return None
        timeout = timedelta(seconds=settings.transfer_timeout_s)
        answer = peers.ask(place.address, token, {"op": "ping"}, timeout)
        if group in answer["groups"] and answer["pid"] == place.pid:
            return place
    return None


def end_keepers(run_dir: Path, timeout: timedelta = timedelta(seconds=5)) -> list[str]:
    """The run is over: tell every keeper to remove its segment and end.

    Returns a sentence for each that could not be told; it ends by itself after keeper_ttl_s.
    """
    token, silent = read_token(run_dir), []
    for place in {place.address: place for place in peers.read_places(run_dir)}.values():
        try:
            peers.ask(place.address, token, {"op": "end"}, timeout)
        except wire.WireError as error:
            silent.append(f"the keeper on {place.host}: {error}")
    return silent


def touch(segment: Segment) -> None:
    """Say that the segment's keeper is still wanted. For agents and trainers, well within keeper_ttl_s."""
    with contextlib.suppress(OSError):  # no segment: nobody to speak for
        (segment.path / "touched").touch()


OWNER_FILE = "owner.json"
ALIVE_S = 60.0
"""A segment that a trainer has touched this recently belongs to a run that goes on, though its keeper died."""
_SEGMENT = re.compile(r"everstep-([0-9a-f]{16})(-group-\d+)?")


@dataclass(frozen=True)
class Litter:
    """A segment that no living keeper has."""

    path: Path
    run_dir: Path | None
    """Of the run it belongs to, as far as it says so."""
    size: int
    """Bytes."""
    age_s: float
    """Since anything in it was written."""
    run_is_there: bool
    """Its run directory is there and still that run's: it could be started again."""

    def describe(self) -> str:
        owner = self.run_dir or "an unknown run"
        state = "which could be started again" if self.run_is_there else "which is gone"
        age = f"{self.age_s / 3600:.1f} h" if self.age_s >= 3600 else f"{self.age_s:.0f} s"
        return f"{self.path}: {self.size / 1e6:.1f} MB of {owner}, {state}; last written {age} ago"


def write_owner(segment: Path, run_dir: Path) -> None:
    """Say in a segment which run it belongs to."""
    write_json(segment / OWNER_FILE, {"run_dir": str(run_dir)})


def find_litter(directory: Path) -> list[Litter]:
    """The segments of this user in `directory` that no living keeper has, the oldest first."""
    found = []
    for path in directory.glob("everstep-*"):
        match = _SEGMENT.fullmatch(path.name)
        try:
            if match is None or not is_own_directory(path) or _is_kept(path):
                continue
            files = [file.stat() for file in path.iterdir() if file.is_file()]
            newest = max([path.stat().st_mtime, *(file.st_mtime for file in files)])
            size = sum(file.st_blocks * 512 for file in files)
        except OSError:
            continue  # it is being removed
        run_dir = _owner(path)
        there = run_dir is not None and _is_run(run_dir, match.group(1))
        found.append(Litter(path, run_dir, size, max(0.0, time.time() - newest), there))
    return sorted(found, key=lambda litter: -litter.age_s)


def remove_litter(litter: Litter) -> bool:
    """Give the memory back, unless a keeper has taken the segment over meanwhile."""
    fd = _lock(litter.path)
    if fd is None:
        return False
    try:
        shutil.rmtree(litter.path, ignore_errors=True)
    finally:
        os.close(fd)
    return not litter.path.exists()


def sweep_behind(directory: Path, ttl_s: float, run: str) -> list[Litter]:
    """What a starting keeper of `run` removes of other runs: of those that are gone, or untouched for longer than the
    time to live."""
    others = [litter for litter in find_litter(directory) if not litter.path.name.startswith(f"everstep-{run}")]
    swept = [litter for litter in others if not litter.run_is_there or litter.age_s > ttl_s]
    return [litter for litter in swept if remove_litter(litter)]


def sweep(directory: Path) -> int:
    """`everstep snapshots --sweep`: say whose each segment is and how old, and remove those that no live run owns."""
    found = find_litter(directory)
    for litter in found:
        alive = litter.run_is_there and litter.age_s < ALIVE_S
        done = (
            "kept: its run is going on"
            if alive
            else "removed"
            if remove_litter(litter)
            else "kept: a keeper has it now"
        )
        print(f"{litter.describe()}: {done}")
    if not found:
        print(f"{directory} holds no snapshots that are nobody's")
    return 0


def _is_kept(path: Path) -> bool:
    fd = _lock(path)
    if fd is None:
        return True
    os.close(fd)
    return False


def _lock(path: Path) -> int | None:
    """The segment's lock, as its keeper would hold it; None while one does, or while a trainer has just made it."""
    if not (path / "lock").exists() and time.time() - path.stat().st_mtime < 60:
        return None  # its keeper is starting
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _owner(path: Path) -> Path | None:
    found = read_json(path / OWNER_FILE).get("run_dir")
    return Path(found) if isinstance(found, str) else None


def _is_run(run_dir: Path, run: str) -> bool:
    try:
        return run_id(read_token(run_dir)) == run
    except (OSError, ValueError):
        return False
