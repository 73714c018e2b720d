"""The checkpoint manager: who writes when, and what a torn checkpoint may not be taken for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager

from everstep.titan.checkpoints import RunCheckpointManager, SnapshotCheckpointManager, of_run, put_in_place
from snapshot_cluster import wait_until


class Bare:
    """What a manager needs to know of the rest of a trainer."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


class Memory:
    """What writes checkpoints of snapshots: a process that runs a Python statement."""

    coded = True

    def __init__(self, statement: str) -> None:
        self._statement = statement
        self.started: list[int] = []

    def start_export(self, step: int, folder: str) -> subprocess.Popen:
        self.started.append(step)
        return subprocess.Popen([sys.executable, "-c", self._statement])


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def manager(folder: Path, writer: str | None, **settings) -> SnapshotCheckpointManager:
    """A manager whose writer is a process that runs `writer`, a Python statement."""
    config = of_run(CheckpointManager.Config(enable=True, interval=4, **settings), from_snapshots=True)
    it = built(config, folder)
    assert isinstance(it, SnapshotCheckpointManager)
    if writer is not None:
        it.export_with(Memory(writer), lambda flag: flag)
    return it


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


def saved(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / "checkpoint").glob("*/.metadata")}


def test_a_checkpoint_that_is_due_is_left_to_the_writer_and_the_trainer_goes_on(tmp_path, alone):
    it = manager(tmp_path, "pass")
    assert [it.save(step) for step in range(1, 6)] == [False] * 5
    assert it._exporter.started == [4]
    it.close()
    assert saved(tmp_path) == set()


def test_after_a_checkpoint_that_could_not_be_taken_from_memory_the_trainer_writes_the_next(tmp_path, alone):
    it = manager(tmp_path, "raise SystemExit(1)")
    it.save(4)
    it._writer.wait()
    assert [it.save(step) for step in (5, 6, 7, 8)] == [False, False, False, True]
    assert saved(tmp_path) == {"step-8"}
    assert not it.save(12), "once"
    assert it._exporter.started == [4, 12]
    it.close()


def test_while_no_snapshot_is_coded_the_trainer_writes_what_is_due(tmp_path, alone):
    it = manager(tmp_path, "pass")
    it._exporter.coded = False
    assert [it.save(step) for step in range(1, 9)] == [False, False, False, True] * 2
    assert (saved(tmp_path), it._exporter.started) == ({"step-4", "step-8"}, [])
    it.close()


def test_no_second_writer_is_started_beside_the_first(tmp_path, alone):
    it = manager(tmp_path, "import time; time.sleep(30)")
    it.save(4)
    it.save(8)
    assert it._exporter.started == [4]
    it._writer.kill()
    it._writer.wait()
    it.close()


def test_the_last_checkpoint_is_whole_when_save_returns(tmp_path, alone):
    it = manager(tmp_path, "import time; time.sleep(0.2)")
    it.save(4)
    assert it.save(6, last_step=True)
    assert it._writer is None
    assert saved(tmp_path) == {"step-6"}
    it.close()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_checkpoint_has_its_name_only_when_it_is_whole(tmp_path, alone, monkeypatch, mode):
    config = CheckpointManager.Config(enable=True, interval=4, async_mode=mode)
    it = built(of_run(config, from_snapshots=False), tmp_path)
    assert type(it) is RunCheckpointManager
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
    it = manager(tmp_path, None)
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


def test_an_unfinished_checkpoint_has_no_name_that_torchtitan_would_load(tmp_path, alone):
    it = manager(tmp_path, None)
    for name in ("writing-0", "writing-12"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
        (tmp_path / "checkpoint" / name / ".metadata").touch()
    assert it._find_load_step() == -1
    it.close()


def test_settings_are_torchtitans_and_a_remote_folder_is_left_to_it():
    config = CheckpointManager.Config(enable=True, interval=7, keep_latest_k=3, folder="elsewhere")
    ours = of_run(config, from_snapshots=True)
    assert type(ours) is SnapshotCheckpointManager.Config
    assert (ours.interval, ours.keep_latest_k, ours.folder) == (7, 3, "elsewhere")
    remote = CheckpointManager.Config(enable=True, folder="gs://bucket/run")
    assert of_run(remote, from_snapshots=False) is remote
