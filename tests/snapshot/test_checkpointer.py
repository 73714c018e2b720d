"""The checkpoint manager: what a torn checkpoint may not be taken for."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager

from everstep.titan.checkpoints import RunCheckpointManager, of_run, put_in_place
from snapshot_cluster import wait_until


class Bare:
    """What a manager needs to know of the rest of a trainer."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(config, folder: Path):
    return config.build(
        dataloader=Bare(rows=1),
        model_parts=[torch.nn.Linear(3, 2)],
        optimizers=Bare(),
        lr_schedulers=Bare(last_epoch=1),
        states={"train_state": Bare(step=1)},
        sd_adapter=None,
        base_folder=str(folder),
    )


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_checkpoint_has_its_name_only_when_it_is_whole(tmp_path, alone, monkeypatch, mode):
    config = CheckpointManager.Config(enable=True, interval=4, async_mode=mode)
    it = built(of_run(config), tmp_path)
    it.write_aside_as(0, "a")
    monkeypatch.setattr(FileSystemWriter, "finish", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))

    def saved_at_last():
        it.save(4)
        it.maybe_wait_for_saving()

    with pytest.raises(CheckpointException, match="disk full"):
        saved_at_last()
    it.save_future = None
    names = [path.name for path in (tmp_path / "checkpoint").iterdir()]
    assert names == ["writing-trainer-0-a"]
    assert it._find_load_step() == -1
    monkeypatch.undo()
    it.write_aside_as(0, "b")
    assert it.save(4)
    it.maybe_wait_for_saving()
    wait_until(lambda: [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-4"])
    assert it._find_load_step() == 4
    it.close()


def test_a_checkpoint_that_cannot_get_its_name_fails_on_all_ranks_alike(tmp_path, alone):
    it = built(of_run(CheckpointManager.Config(enable=True, interval=4)), tmp_path)
    (tmp_path / "checkpoint").mkdir(exist_ok=True)
    (tmp_path / "checkpoint" / "step-4").write_text("in the way")
    with pytest.raises(CheckpointException, match="step-4"):
        it.save(4)
    it.close()


def test_only_a_whole_checkpoint_gets_its_name(tmp_path):
    folder = tmp_path / "checkpoint"
    for name in ("step-4", "writing-0"):
        (folder / name).mkdir(parents=True)
        (folder / name / ".metadata").write_text(name)
    (folder / "step-4" / "__7_0.distcp").write_text("of before")
    put_in_place(folder / "writing-0", folder / "step-4")
    assert [path.name for path in folder.iterdir()] == ["step-4"]
    assert [path.read_text() for path in (folder / "step-4").iterdir()] == ["writing-0"]


def test_settings_are_torchtitans_and_a_remote_folder_is_left_to_it():
    config = CheckpointManager.Config(enable=True, interval=7, keep_latest_k=3, folder="elsewhere")
    ours = of_run(config)
    assert type(ours) is RunCheckpointManager.Config
    assert (ours.interval, ours.keep_latest_k, ours.folder) == (7, 3, "elsewhere")
    remote = CheckpointManager.Config(enable=True, folder="gs://bucket/run")
    assert of_run(remote) is remote
