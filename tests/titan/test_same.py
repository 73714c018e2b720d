"""`everstep same`: two runs are compared to the bit."""

import math
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from everstep.commands.replay import same, told_of
from everstep.run.directory import LaunchError
from everstep.run.events import EventLog

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def make_run(run_dir, *, loss=0.1, checksum="c0ffee", tensor=None, checkpoints=(2, 4)):
    """A run of six steps; `loss` and `checksum` are those of step 4."""
    for group in (0, 1):
        events = EventLog(run_dir, group, 0, "worker")
        for step in range(1, 7):
            made = {"loss": loss if step == 4 else 1 / step, "grad_norm": 2.0, "tokens": 7.0}
            events.emit("commit", step, groups=[0, 1], history=run_dir.name, parent="0", **made)
            summed = checksum if step == 4 else f"{step:x}"
            events.emit("audit", step, checksum=summed, differing=[])
        events.close()
    for step in checkpoints:
        state = {"model.w": torch.ones(8, 4) if tensor is None else tensor, "optimizer.m": torch.zeros(3)}
        dcp.save(state, checkpoint_id=str(run_dir / "checkpoint" / f"step-{step}"), no_dist=True)
    return run_dir


@pytest.mark.parametrize(("other", "status", "said"), [
    ({}, 0, ("6 in both runs, 6 with a checksum", "after step 4, 2 tensors compared")),
    ({"loss": math.nextafter(0.1, 1)}, 1, ("they diverge at step 4: losses",)),
    ({"checksum": "c0ffef"}, 1, ("they diverge at the parameters after step 4",)),
    ({"tensor": torch.ones(8, 4) * -torch.tensor([1.0, -1, -1, -1])}, 1, ("model.w: 8 of 32 elements differ",)),
    ({"tensor": torch.ones(8, 4).double()}, 1, ("model.w is torch.float32 [8, 4] and torch.float64 [8, 4]",)),
    ({"tensor": 3}, 1, ("model.w is a tensor in only one of the checkpoints",)),
    ({"checkpoints": (5,)}, 0, ("checkpoint none of a step that both runs have",)),
])  # fmt: skip
def test_the_first_difference_is_named(tmp_path, capsys, other, status, said):
    """Also if a run's checkpoints are in another folder, or other folders are beside them."""
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b", **other)
    (one / "checkpoint").rename(one / "elsewhere")
    (one / "config.toml").write_text('[checkpoint]\nfolder = "elsewhere"\n')
    shutil.copytree(two / "checkpoint", two / "checkpoint" / "step-4.kept")
    (two / "checkpoint" / "step-4.kept" / ".metadata").touch()
    assert same(one, two) == status
    told = capsys.readouterr().out
    assert all(sentence in told for sentence in said), told


@pytest.mark.parametrize("part", [".", "of-a-worker"])
def test_damaged_checkpoints_are_not_the_same(tmp_path, capsys, part):
    """Also if the same part is damaged in both runs."""
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for run_dir in (one, two):
        damaged = run_dir / "checkpoint" / "step-4" / part
        dcp.save({"worker": torch.ones(1)}, checkpoint_id=str(damaged), no_dist=True)
        os.truncate(damaged / ".metadata", 40)
    assert same(one, two) == 1
    assert f"{one / 'checkpoint' / 'step-4' / part / '.metadata'} is damaged" in capsys.readouterr().out


def test_a_checkpoint_whose_data_is_cut_off_is_named(tmp_path):
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    os.truncate(next((two / "checkpoint" / "step-4").glob("*.distcp")), 40)
    with pytest.raises(LaunchError, match="b/checkpoint/step-4 cannot be read: "):
        same(one, two)


def test_a_replay_keeps_only_the_steps_that_it_computes_again(tmp_path):
    found = told_of(make_run(tmp_path, checkpoints=()), range(4, 6))
    assert {step: told.sums for step, told in found.items()} == {4: {(0.1, 2.0)}, 5: {(0.2, 2.0)}}
