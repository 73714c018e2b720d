"""Starting, finding and ending keepers: for trainers, which they outlive."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from everstep import wire
from everstep.run.token import read_token
from everstep.snapshot import peers
from everstep.snapshot.peers import Place
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment

START_TIMEOUT_S = 30.0
LOCKED_EXIT = 3
"""Status of a keeper that found another of its run, group and host."""


class KeeperError(RuntimeError):
    """A keeper that could not be started; the message says why."""


def start_keeper(run_dir: Path, group: int, host: str, settings: Snapshot, encrypt: bool = False) -> Place:
    """Start this host's keeper of a group, or find the one that is already there.

    `host`: address to listen on and advertise (fault_tolerance.bind_host). `encrypt`: fault_tolerance.encrypt; a keeper
    that is already there stays as it was started.

    Raises:
        KeeperError: it did not come up; the message has its last words.
    """
    run_dir = run_dir.resolve()
    place = find_keeper(run_dir, group, settings)
    if place is not None:
        return place
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
        if answer["group"] == group and answer["pid"] == place.pid:
            return place
    return None


def end_keepers(run_dir: Path, groups: set[int] | None = None, timeout: timedelta = timedelta(seconds=5)) -> list[str]:
    """The run is over: tell every keeper (or those of `groups`) to remove its segment and end.

    Returns a sentence for each that could not be told; it ends by itself after keeper_ttl_s.
    """
    token, silent = read_token(run_dir), []
    for place in peers.read_places(run_dir):
        if groups is not None and place.group not in groups:
            continue
        try:
            peers.ask(place.address, token, {"op": "end"}, timeout)
        except wire.WireError as error:
            silent.append(f"keeper of group {place.group} on {place.host}: {error}")
    return silent


def touch(segment: Segment) -> None:
    """Say that the segment's keeper is still wanted. For agents and trainers, well within keeper_ttl_s."""
    with contextlib.suppress(OSError):  # no segment: nobody to speak for
        (segment.path / "touched").touch()
