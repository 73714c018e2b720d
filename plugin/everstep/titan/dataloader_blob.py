"""A dataloader's state as a blob of a snapshot."""

import io

import torch

DATALOADER_BLOB = "dataloader"


def pack_dataloader(state: dict) -> bytes:
    """A dataloader's `state_dict()` (numbers, strings, bytes) as a blob of a snapshot."""
    sink = io.BytesIO()
    torch.save(state, sink)
    return sink.getvalue()


def unpack_dataloader(blobs: list[dict[str, bytes]]) -> dict:
    """The state of all ranks' dataloaders, each of which has keys of its own."""
    merged: dict = {}
    for blob in blobs:
        merged |= torch.load(io.BytesIO(blob[DATALOADER_BLOB]), weights_only=True)  # noqa: TID251  plain tensors only
    return merged
