"""Small files of a run's state: written whole or not at all."""

import json
import os
from pathlib import Path


def write_json(path: Path, value: dict) -> None:
    """Replace a small file of the run's state, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def read_json(path: Path) -> dict:
    """What `write_json` wrote; {} if there is nothing."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def order_file(run_dir: Path, group: int, rank: int = 0) -> Path:
    """Where a rank of a run that allows faults is told to break itself (`everstep.chaos.orders`)."""
    return Path(run_dir) / "state" / "chaos" / f"group-{group}.rank-{rank}.json"
