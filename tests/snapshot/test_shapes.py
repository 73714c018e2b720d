"""A snapshot restores into groups of any shape, tensor by tensor as it was saved."""

import itertools
from datetime import timedelta

import pytest
import torch

from everstep.snapshot import recovery
from everstep.snapshot.copier import Copier
from everstep.snapshot.layout import Layout, Shard, State
from snapshot_cluster import TIMEOUT, Cluster, wait_until

Rank = tuple[dict[str, torch.Tensor], dict[str, Shard]]


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a whole state: two layers, an output layer, a norm, and an optimizer's moments and step counters."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in (("layers.0.w", (7, 6)), ("layers.1.w", (7, 6)), ("output.w", (9, 4)), ("norm.w", (5,))):
        found[f"param/{name}"] = torch.randn(shape, generator=generator)
        found[f"optimizer/{name}/exp_avg"] = torch.randn(shape, generator=generator).to(torch.bfloat16)
        found[f"optimizer/{name}/step"] = torch.tensor(3.0)
    return found


def cut(state: dict[str, torch.Tensor], ranks: int, dimension: int) -> list[Rank]:
    """Shard a state along a dimension, as FSDP (0) and TP (1) do; vectors along 0, scalars not at all."""
    made: list[Rank] = []
    for rank in range(ranks):
        tensors, shards = {}, {}
        for name, tensor in state.items():
            if tensor.dim() == 0:
                tensors[name] = tensor.clone()
                continue
            along = min(dimension, tensor.dim() - 1)
            size = -(-tensor.shape[along] // ranks)
            start = min(rank * size, tensor.shape[along])
            piece = tensor.narrow(along, start, min(size, tensor.shape[along] - start))
            tensors[name] = piece.contiguous().clone()
            shards[name] = Shard(tuple(tensor.shape), tuple(start if d == along else 0 for d in range(tensor.dim())))
        made.append((tensors, shards))
    return made


def stages(state: dict[str, torch.Tensor]) -> list[Rank]:
    """Split a state into two pipeline stages, each with the tensors of its layers."""
    first = {name: tensor.clone() for name, tensor in state.items() if "layers.0" in name}
    return [(first, {}), ({name: tensor.clone() for name, tensor in state.items() if name not in first}, {})]


SHAPES = {
    "one rank": lambda s: [({name: tensor.clone() for name, tensor in s.items()}, {})],
    "FSDP 2": lambda s: cut(s, 2, 0),
    "FSDP 3": lambda s: cut(s, 3, 0),
    "TP 2": lambda s: cut(s, 2, 1),
    "PP 2": stages,
}


def save(run: Cluster, ranks: list[Rank]) -> None:
    """Commit one step of groups with these ranks."""
    run.kill_trainers()
    for group, rank in itertools.product(run.groups, range(len(ranks))):
        segment, settings = run.segment(group), run.settings_of(group)
        run.copiers[group, rank] = Copier(segment, rank, len(ranks), settings, lambda *a, **k: None)
    for (_, rank), copier in run.copiers.items():
        tensors, shards = ranks[rank]
        state = State(tensors, {"step": 1}, {"data": bytes([rank])}, shards)
        copier.committed(1, 1, run.groups, {}, lambda state=state: state)
    run.wait()


def restored(run: Cluster, ranks: list[Rank], rank: int) -> recovery.Recovery:
    layouts = [Layout.of(*each) for each in ranks]
    return recovery.recover(
        run.run_dir, group=0, rank=0, ranks=len(ranks), layout=layouts[rank], disk_step=None, timeout=TIMEOUT,
        patience=timedelta(0),
    )  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [
    ("one rank", "FSDP 2"), ("TP 2", "FSDP 3"), ("FSDP 2", "TP 2"), ("PP 2", "one rank"), ("PP 2", "TP 2"),
])  # fmt: skip
def test_what_is_restored_into_another_shape_is_what_was_saved(before, after):
    state = model()
    with Cluster(2, parity=0) as run:
        save(run, SHAPES[before](state))
        wanted = SHAPES[after](state)
        for rank, (tensors, shards) in enumerate(wanted):
            if rank and before != "one rank":
                # `recover` decides on rank 0 of a group; the other ranks reshape with the same decision.
                layout = Layout.of(tensors, shards)
                found = recovery.restore_reshaped(run.decide(), rank, 0, layout, run.token, TIMEOUT)
            else:
                found = restored(run, [wanted[rank], *wanted[1:]], rank).restored
            views = Layout.of(tensors, shards).views(torch.from_numpy(found.flat))
            assert views.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(views[name], tensor), name


def test_a_lost_host_is_decoded_before_its_shards_are_cut():
    state = model(2)
    with Cluster(3) as run:
        save(run, SHAPES["FSDP 2"](state))
        wait_until(lambda: all(copier.status().coded for copier in run.copiers.values()))
        run.lose_host(1)
        found = restored(run, SHAPES["one rank"](state), 0)
        assert found.decision.source == "parity"
        assert found.restored.decoded == (1,)
        views = Layout.of(state).views(torch.from_numpy(found.restored.flat))
        assert all(torch.equal(views[name], tensor) for name, tensor in state.items())
