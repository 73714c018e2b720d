"""What W&B wrote into a folder without a network."""

import json


def records(data):
    """The records of a W&B offline file: LevelDB's log format, blocks of 32 KiB, after seven bytes of W&B's own."""
    at, parts = 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_offline(folder):
    """The ids of the W&B runs below `folder`, and (step, values) of every point, in the order of the files."""
    from wandb.proto import wandb_internal_pb2

    ids, points = set(), []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            ids |= {record.run.run_id} - {""}
            if record.HasField("history"):
                history = record.history
                values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
                points.append((history.step.num, values))
    return ids, points
