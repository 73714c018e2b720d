"""What is told of checkpoints that are written while training goes on."""

import errno
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from everstep.titan.checkpoints import write_aside
from everstep.titan.disk import DiskCheckpoints
from everstep.titan.names import CheckpointManager


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_a_checkpoint_is_told_of_when_it_has_its_name_and_a_failure_costs_no_other(alone, tmp_path, monkeypatch, mode):
    """The disk is full at step 10, and has room again at 20; the name of step 30 is taken."""
    config = CheckpointManager.Config(enable=True, interval=10, async_mode=mode)
    further = {"model_parts": [torch.nn.Linear(4, 4)], "optimizers": {}, "lr_schedulers": {}, "dataloader": {}}
    manager = CheckpointManager(config, **further, states={}, sd_adapter=None, base_folder=str(tmp_path))
    told, here = [], tmp_path / "checkpoint"
    place = SimpleNamespace(
        events=SimpleNamespace(emit=lambda kind, step, **fields: told.append((kind, step, fields.get("reason", "")))),
        files=SimpleNamespace(beat=lambda *said: None),
    )
    disk = DiskCheckpoints(
        SimpleNamespace(config=SimpleNamespace(checkpoint=config), checkpointer=manager, place=place)
    )
    write_aside(manager, 0, "life")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", full)
        disk.save(10, 10)
        manager.maybe_wait_for_saving()
    (here / "step-30").touch()
    for step in (20, 25, 30, 40):
        disk.save(step, step)
    manager.maybe_wait_for_saving()
    assert [(kind.removeprefix("checkpoint_"), step) for kind, step, _ in told] == [
        ("failed", 10),
        ("saved", 20),
        ("failed", 30),
        ("saved", 40),
    ]
    assert "No space left" in told[0][2]
    assert "GiB free there" in told[0][2]
    assert "Not a directory" in told[2][2]
    manager.close()
