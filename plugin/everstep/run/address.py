"""The lighthouse's address, in one small file of the run directory, which all nodes share.

The lighthouse's launcher writes the file once the lighthouse serves. Workers read it before every quorum, because the
lighthouse may have moved to another node. An address that they were given counts only if the file has none. If a run
has two lighthouses, the older one sees the other's address in the file and ends.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

from everstep.run.files import read_json, write_json

POLL_S = 0.2
ADDRESS = re.compile(r"https?://(?:\[[A-Za-z0-9.:%]{1,253}\]|[A-Za-z0-9._:-]{1,255}):([0-9]{1,5})/?")


def address_file(run_dir: Path) -> Path:
    """Return the file with the lighthouse's address."""
    return Path(run_dir) / "state" / "lighthouse.json"


def publish_address(run_dir: Path, address: str) -> None:
    """Publish the lighthouse's address (`http://host:port`)."""
    write_json(address_file(run_dir), {"address": address})


def published_address(run_dir: Path) -> str:
    """Return the lighthouse's address as last published; "" if there is none or the file holds no valid address."""
    found = ADDRESS.fullmatch(str(read_json(address_file(run_dir)).get("address")))
    return found[0] if found and int(found[1]) <= 65535 else ""


def await_address(run_dir: Path, stopping: Callable[[], bool], timeout_s: float) -> None:
    """Wait until an address is published or `stopping()` is true. Raises TimeoutError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not published_address(run_dir) and not stopping():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"no lighthouse has published its address in {address_file(run_dir)} for {timeout_s:g} s; "
                "start one with `everstep lighthouse`"
            )
        time.sleep(POLL_S)
