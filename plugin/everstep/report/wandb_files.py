"""What W&B has stored of a run without a network, read back: what it had not stored when it was killed is not there.

A `.wandb` file is seven bytes of W&B's own and a log of protocol buffers as LevelDB writes them: blocks of 32 KiB,
records cut into parts with a header of checksum, length and kind (LevelDB, doc/log_format.md).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OWN_HEADER, _BLOCK, _PART_HEADER = 7, 32 << 10, 7
_WHOLE, _LAST = 1, 4


def newest_step(run_dir: Path, run_id: str) -> int:
    """The newest step of W&B's run `run_id` in the offline files below `run_dir`; -1 without any."""
    files = run_dir.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    return max((step for file in files for step, _ in points(file)), default=-1)


def points(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, values by name) of each call of `log` that the file has whole."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    for data in _records(file.read_bytes()):
        record = messages.Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            yield record.history.step.num, values


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = _OWN_HEADER, b""
    while at + _PART_HEADER <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _PART_HEADER:  # filled up with zeros
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += _PART_HEADER
        if at + size > len(data):  # torn
            return
        parts += data[at : at + size]
        at += size
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
