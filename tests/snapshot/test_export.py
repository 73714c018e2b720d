"""Checkpoints out of memory: the right bytes under torchtitan's names, from a run that trains or is dead."""

import io
import signal
import subprocess
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from everstep.snapshot.layout import Layout, Shard
from everstep.snapshot.recovery import ExportError, fetch, whole
from everstep.snapshot.restore import Restored
from everstep.titan.dataloader_blob import DATALOADER_BLOB, pack_dataloader, unpack_dataloader
from snapshot_cluster import TIMEOUT, Cluster, state_of
from snapshot_runs import STEPS, Run, end

AT_ONCE = timedelta(0)


def test_the_newest_step_is_fetched_whole_and_an_older_one_is_not_enough():
    with Cluster(3) as run:
        for step in (1, 2):
            run.commit(step)
        run.wait()
        found = whole(fetch(run.run_dir, timeout=TIMEOUT, patience=AT_ONCE))
        want = state_of(2)
        assert found.step == 2
        assert found.tensors.keys() == want.tensors.keys()
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in want.tensors.items())
        assert (found.meta, found.blobs) == (want.meta, [want.blobs])
        with pytest.raises(ExportError, match="the newest step in memory is 2, not 3"):
            fetch(run.run_dir, not_before=3, timeout=TIMEOUT, patience=AT_ONCE)


def test_a_lost_host_does_not_keep_the_state_from_being_written():
    with Cluster(3) as run:
        run.take(4)
        run.lose_host(1)
        found = whole(fetch(run.run_dir, timeout=TIMEOUT, patience=TIMEOUT))
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state_of(4).tensors.items())


def test_nothing_in_memory_is_said_with_the_reason():
    with Cluster(2) as run, pytest.raises(ExportError, match="no keeper holds a snapshot"):
        fetch(run.run_dir, timeout=TIMEOUT, patience=AT_ONCE)


def test_shards_of_several_ranks_become_whole_tensors():
    weight = torch.arange(35, dtype=torch.float32).view(7, 5)
    steps = torch.tensor(3.0)
    ranks = []
    for rank, rows in enumerate((slice(0, 4), slice(4, 7))):
        tensors = {"param/w": weight[rows].clone(), "optimizer/0/0/step": steps}
        layout = Layout.of(tensors, {"param/w": Shard((7, 5), (rows.start, 0))})
        flat = torch.zeros(layout.size, dtype=torch.uint8)
        for name, view in layout.views(flat).items():
            view.copy_(tensors[name])
        blobs = {DATALOADER_BLOB: pack_dataloader({"rows_read": 8, f"dp_rank_{rank}": bytes([rank])})}
        body = {"size": layout.size, "entries": [asdict(entry) for entry in layout.entries]}
        ranks.append(Restored(9, 7, "", flat.numpy(), body, {"lr": 1}, blobs))
    found = whole(ranks)
    assert torch.equal(found.tensors["param/w"], weight)
    assert torch.equal(found.tensors["optimizer/0/0/step"], steps)
    assert unpack_dataloader(found.blobs) == {"rows_read": 8, "dp_rank_0": b"\0", "dp_rank_1": b"\1"}


def contents(checkpoint: Path) -> dict:
    """Everything in a DCP checkpoint, flat, by torchtitan's names."""
    file = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, file)
    flat, levels = {}, [("", torch.load(io.BytesIO(file.read_bytes()), weights_only=False))]
    while levels:
        path, level = levels.pop()
        for name, value in level.items():
            if isinstance(value, dict):
                levels.append((f"{path}{name}.", value))
            else:
                flat[path + name] = value
    return flat


def assert_same(one: Path, other: Path) -> None:
    found, want = contents(one), contents(other)
    assert found.keys() == want.keys()
    for name, value in want.items():
        if name == "train_state.history":  # names the quorums of a run, which are others in the next
            continue
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, f"{name}: {found[name]}, not {value}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_from_memory_is_bit_for_bit_the_one_that_the_trainer_writes(tmp_path, ranks):
    disk = ["--groups", "1", "--ranks-per-group", str(ranks), "--checkpoint.enable", "--checkpoint.interval", "6"]
    disk += ["--training.mixed_precision_param", "float32", "--checkpoint.no-last_save_model_only"]
    disk += ["--lr_scheduler.total_steps", "1000"]
    # The process that writes takes seconds to start; a run that is over sooner writes its last state itself.
    memory = Run(tmp_path, "memory", [*disk, "--snapshot.interval", "6", "--steps", "10000"])
    memory.start()
    try:
        memory.until_saved(6)
        memory.process.send_signal(signal.SIGINT)
        assert memory.process.wait() == 0
    finally:
        end(memory)
    saved = memory.events("checkpoint_saved")[0]
    assert saved["source"] == "memory"
    trainer = Run(tmp_path, "trainer", [*disk, "--snapshot.no-enable", "--steps", str(saved["step"])])
    trainer.start()
    assert trainer.process.wait() == 0
    assert_same(*(run.dir / "checkpoint" / f"step-{saved['step']}" for run in (memory, trainer)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dead_run_is_exported_and_goes_on_elsewhere_with_the_same_losses(tmp_path):
    flags = ["--groups", "2", "--training.mixed_precision_param", "float32"]
    reference, run = Run(tmp_path, "reference", flags), Run(tmp_path, "run", flags)
    reference.start()
    assert reference.process.wait() == 0
    try:
        run.start()
        run.until(6)
        run.kill_all_but_keepers()
        folder = tmp_path / "exported"
        command = [sys.executable, "-m", "everstep.cli", "snapshots", str(run.dir), "--export", str(folder)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "--checkpoint.initial_load_path" in said
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (again.returncode, "is there already" in again.stderr) == (2, True)
        load = ["--checkpoint.enable", "--checkpoint.initial_load_path", str(folder)]
        other = Run(tmp_path, "other", [*flags, *load, "--checkpoint.no-initial_load_model_only"])
        other.start()
        assert other.process.wait() == 0
        losses = {step: event["loss"] for step, event in other.commits().items()}
        assert min(losses) > 4, "at steps of half a second a snapshot may be left out"
        assert max(losses) == STEPS
        assert losses == pytest.approx({s: reference.commits()[s]["loss"] for s in losses}, abs=1e-4)
    finally:
        end(run)
