"""Where the lighthouse is: one small file in the run directory, which all nodes share.

Whoever runs the lighthouse writes it once the lighthouse listens; agents and workers that were not given an address
read it, workers before every quorum: the lighthouse may have moved to another node. Of two lighthouses the older one
sees that another address stands there, and ends.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

from everstep.run.files import read_json, write_json

POLL_S = 0.2
ADDRESS = re.compile(r"https?://(?:\[[A-Za-z0-9.:%]{1,253}\]|[A-Za-z0-9._:-]{1,255}):([0-9]{1,5})/?")


def address_file(run_dir: Path) -> Path:
    return Path(run_dir) / "state" / "lighthouse.json"


def publish_address(run_dir: Path, address: str) -> None:
    """Say that the lighthouse is at `address` (http://host:port)."""
    write_json(address_file(run_dir), {"address": address})


def published_address(run_dir: Path) -> str:
    """The lighthouse's address as it was last published; "" if it never was, or something else stands there."""
    found = ADDRESS.fullmatch(str(read_json(address_file(run_dir)).get("address")))
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
