"""Checkpoints on disk: an incomplete one is not taken for a checkpoint, and events tell what became of each."""

import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from everstep.step.attempt import Outcome
from everstep.titan import checksums
from everstep.titan.disk import DiskCheckpoints, save_via_draft
from everstep.titan.names import TRAIN_STATE, CheckpointManager
from everstep.titan.parts import checkpoints_in, clear_draft, put_in_place, tensors_in
from everstep.titan.trainer import EverstepTrainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["disabled", "async"])
def manager(request, tmp_path):
    """torchtitan's checkpoint manager, in a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = CheckpointManager.Config(enable=True, interval=10, async_mode=request.param)
    parts = {"model_parts": [torch.nn.Linear(3, 2)], "optimizers": {}, "lr_schedulers": {}, "dataloader": {}}
    manager = CheckpointManager(config, **parts, states={}, sd_adapter=None, base_folder=str(tmp_path))
    yield manager
    manager.close()
    dist.destroy_process_group()


def raises(error):
    def refused(*args, **kwargs):
        raise error

    return refused


def test_a_checkpoint_has_its_name_only_when_it_is_whole(tmp_path, manager, monkeypatch):
    save_via_draft(manager, "0", "a")

    def saved_at_last():
        manager.save(10)
        manager.maybe_wait_for_saving()
        return [path.name for path in (tmp_path / "checkpoint").iterdir()]

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "finish", raises(OSError("disk full")))
        with pytest.raises(CheckpointException, match="disk full"):
            saved_at_last()
    manager.save_future = None
    assert [*(tmp_path / "checkpoint").iterdir()] == [], "what was written does not fill the disk"
    (tmp_path / "checkpoint" / "writing-trainer-0-a").mkdir()  # as by a group that is killed while it writes
    assert manager._find_load_step() == -1
    save_via_draft(manager, "0", "b")
    assert (saved_at_last(), manager._find_load_step()) == (["step-10"], 10)


def test_a_checkpoint_is_told_of_when_it_has_its_name_and_a_failure_costs_no_other(tmp_path, manager, monkeypatch):
    """The disk is full at step 10, and has room again at 20; the name of step 30 is taken."""
    trainer, told = MagicMock(checkpointer=manager), []
    trainer.context.events.emit = lambda kind, step, **fields: told.append((kind, step, fields.get("reason", "")))
    disk = DiskCheckpoints(trainer)
    save_via_draft(manager, "0", "life")
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", raises(OSError(errno.ENOSPC, "No space left on device")))
        disk.save(10, 10)
        manager.maybe_wait_for_saving()
        with pytest.raises(OSError, match=f"last checkpoint was not written to {manager.folder}: OSError: .*No space"):
            disk.save(10, 10, last=True)
    (tmp_path / "checkpoint" / "step-30").symlink_to("nowhere")
    for step in (20, 25, 30, 40):
        disk.save(step, step)
    manager.maybe_wait_for_saving()
    became = [f"{kind.removeprefix('checkpoint_')} {step}" for kind, step, _ in told]
    assert became == ["failed 10", "saved 20", "failed 30", "saved 40"]
    assert "No space left" in told[0][2]
    assert "GiB free there" in told[0][2]
    assert "Not a directory" in told[2][2]


def test_a_run_goes_on_from_the_newest_checkpoint_without_a_flipped_bit(tmp_path, manager, monkeypatch):
    config = CheckpointManager.Config(enable=True)
    trainer = MagicMock(checkpointer=manager, **{"config.checkpoint": config, "context.run_dir": tmp_path})
    save_via_draft(manager, "0", "life")
    manager.states[TRAIN_STATE] = SimpleNamespace(step=torch.zeros(1000))
    for step in (10, 20):
        manager.save(step)
    manager.maybe_wait_for_saving()
    disk = DiskCheckpoints(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "_digest", raises(OSError(errno.ESTALE, "Stale file handle")))
        with pytest.raises(OSError, match="Stale file handle"):  # the file may be whole
            disk.leave_out_damaged()
    for step, kind in ((20, ".metadata"), (10, "*.distcp")):
        (file,) = (tmp_path / "checkpoint" / f"step-{step}").glob(kind)
        checksum = file.with_name(f"{file.name}.xxh3")
        checksum.rename(tmp_path / checksum.name)
        checksum.symlink_to(tmp_path / checksum.name)  # as in a copy made of links
        assert (disk.leave_out_damaged(), disk.newest()) == (step == 10, step)
        content = bytearray(file.read_bytes())
        content[content.index(b"weight") if kind == ".metadata" else -500] ^= 4
        file.write_bytes(content)
        assert bool(tensors_in(file.parent)) == (step == 10), "what is damaged is not unpickled"
    file.unlink()
    assert (disk.leave_out_damaged(), disk.newest()) == (True, None)
    with pytest.raises(OSError, match=r"step-20 is damaged: .*metadata is not what was .*, rename it to abandoned-20"):
        disk.load()


def test_a_group_that_dies_while_it_replaces_a_checkpoint_leaves_a_whole_one(tmp_path, monkeypatch):
    for name in ("draft", "step-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    monkeypatch.setattr("shutil.rmtree", raises(SystemExit))
    with pytest.raises(SystemExit):
        put_in_place(tmp_path / "draft", tmp_path / "step-10")
    assert [*checkpoints_in(tmp_path)] == [10]
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "missing", tmp_path / "step-10")
    assert [*checkpoints_in(tmp_path)] == [10], "the old one, if the new one cannot be renamed"
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: rename(self, to) if to.name != "step-10" else sys.exit())
    with pytest.raises(SystemExit):
        put_in_place(tmp_path / "b", tmp_path / "step-10")
    monkeypatch.undo()
    clear_draft(*tmp_path.glob("b-*"))
    assert [*checkpoints_in(tmp_path)] == [10], "the old one, at the group's next start"
    (tmp_path / "step-10" / "model.safetensors.index.json").touch()
    (tmp_path / "again").mkdir()
    put_in_place(tmp_path / "again", tmp_path / "step-10")
    assert (tmp_path / "abandoned-10.0" / ".metadata").exists(), "an export is kept, and nothing removed"


@pytest.mark.parametrize("over", [False, True])
def test_without_checkpoints_snapshots_outlive_a_run_that_was_stopped_but_not_one_that_is_over(over):
    trainer = MagicMock()
    trainer.context.files.is_over.return_value = over
    trainer.config.checkpoint.load_only = True
    trainer.disk, trainer.participation.run.return_value = DiskCheckpoints(trainer), Outcome.OVER
    EverstepTrainer.train(trainer)
    trainer.context.snapshots.close.assert_called_once_with(over=over, leaves=False)
