"""The checkpoint manager: what a torn checkpoint may not be taken for."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager

from everstep.titan.checkpoints import write_aside
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
    it = built(config, tmp_path)
    write_aside(it, 0, "a")
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
    write_aside(it, 0, "b")
    assert it.save(4)
    it.maybe_wait_for_saving()
    wait_until(lambda: [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-4"])
    assert it._find_load_step() == 4
    it.close()


def test_a_checkpoint_that_cannot_get_its_name_is_told_to_whoever_saved_it(tmp_path, alone, monkeypatch):
    it = built(CheckpointManager.Config(enable=True, interval=4), tmp_path)
    write_aside(it, 0, "a")
    rename = Path.rename

    def refused(self, target):
        if self.is_dir():
            raise OSError("not permitted")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointException, match="not permitted"):
        it.save(4)
    assert it._find_load_step() == -1
    it.close()
