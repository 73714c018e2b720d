"""Where the lighthouse is: one small file in the run directory, which all nodes share.

Whoever runs the lighthouse writes it once the lighthouse listens; agents and workers that were not given an address
read it, workers before every quorum: the lighthouse may have moved to another node. Each publication has a higher epoch
than the one before, so of two lighthouses the older one sees that it is not the one any more, and ends.
"""

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.run.files import locked, read_typed, write_json
from everstep.run.typed import Count

POLL_S = 0.2
ADDRESS = re.compile(r"https?://(?:\[[A-Za-z0-9.:%]{1,253}\]|[A-Za-z0-9._:-]{1,255}):([0-9]{1,5})/?")


@dataclass(frozen=True)
class _Publication:
    """What the file holds."""

    address: str
    pid: int
    since: float
    """Wall time, for a person who reads it."""
    epoch: Count


def address_file(run_dir: Path) -> Path:
    return Path(run_dir) / "state" / "lighthouse.json"


def publish_address(run_dir: Path, address: str, pid: int) -> int:
    """Say that the lighthouse is at `address` (http://host:port); the epoch of this publication."""
    path = address_file(run_dir)
    with locked(path):
        before = read_typed(_Publication, path)
        here = _Publication(address, pid, time.time(), 1 if before is None else before.epoch + 1)
        write_json(path, asdict(here))
    return here.epoch


def superseded(run_dir: Path, epoch: int) -> bool:
    """Whether another lighthouse was published after the one of `epoch`."""
    newest = read_typed(_Publication, address_file(run_dir))
    return newest is not None and newest.epoch > epoch


def published_address(run_dir: Path) -> str:
    """The lighthouse's address as it was last published; "" if it never was, or something
    else stands there."""
    newest = read_typed(_Publication, address_file(run_dir))
    found = None if newest is None else ADDRESS.fullmatch(newest.address)
    return found[0] if found and int(found[1]) <= 65535 else ""


def await_address(run_dir: Path, stopping: Callable[[], bool], timeout_s: float) -> None:
    """Wait until an address is published, or for a stop. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not published_address(run_dir) and not stopping():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"no lighthouse has published its address in {address_file(run_dir)} for {timeout_s:g} s; "
                "start one with `everstep lighthouse`"
            )
        time.sleep(POLL_S)
