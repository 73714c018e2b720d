"""Ranks' shards are put together to whole tensors, or it is said why they cannot be."""

from dataclasses import asdict

import pytest
import torch

from everstep.snapshot.layout import Layout, Shard
from everstep.snapshot.recovery import ExportError, whole
from everstep.snapshot.restore import Restored


def rank_with(tensors: dict[str, torch.Tensor], shards: dict[str, Shard]) -> Restored:
    layout = Layout.of(tensors, shards)
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    body = {"size": layout.size, "entries": [asdict(entry) for entry in layout.entries]}
    return Restored(9, 7, "", flat.numpy(), body, {}, {})


WEIGHT = torch.arange(35, dtype=torch.float32).view(7, 5)


def part(rows: slice, columns: slice = slice(0, 5)) -> Restored:
    shard = Shard((7, 5), (rows.start, columns.start))
    return rank_with({"param/w": WEIGHT[rows, columns].clone()}, {"param/w": shard})


def test_a_replicated_shard_counts_once():
    ranks = [part(slice(0, 4)), part(slice(0, 4)), part(slice(4, 7)), part(slice(4, 7))]
    assert torch.equal(whole(ranks).tensors["param/w"], WEIGHT)


def test_shards_in_two_dimensions_are_put_in_their_places():
    boxes = [
        (slice(0, 4), slice(0, 2)),
        (slice(0, 4), slice(2, 5)),
        (slice(4, 7), slice(0, 2)),
        (slice(4, 7), slice(2, 5)),
    ]
    assert torch.equal(whole([part(*box) for box in boxes]).tensors["param/w"], WEIGHT)


def test_what_no_rank_holds_is_not_made_up():
    with pytest.raises(ExportError, match=r"shards of param/w make up 20 elements of 35"):
        whole([part(slice(0, 4))])


def test_pipeline_stages_are_put_side_by_side():
    stages = [rank_with({f"param/layers.{n}": torch.full((2,), float(n))}, {}) for n in (0, 1)]
    assert {name: t.tolist() for name, t in whole(stages).tensors.items()} == {
        "param/layers.0": [0.0, 0.0],
        "param/layers.1": [1.0, 1.0],
    }
