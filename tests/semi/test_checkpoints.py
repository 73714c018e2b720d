"""Checkpoints of semi-synchronous runs: each group writes the workers that it carries, and reads those that it will."""

import shutil
from pathlib import Path

import pytest

from everstep.titan.parts import workers_in
from everstep.titan.same import checkpoints
from semi_runs import SYNC_STEPS, WORKERS, quick_config, worst
from watched import until

ROUNDS, EVERY, PACE_S = 12, 2, 0.15
STEPS = ROUNDS * SYNC_STEPS


def config(path, model="tiny", *, rounds=ROUNDS, workers=WORKERS, **checkpoint):
    return quick_config(
        path, rounds, model, workers=workers, checkpoint={"interval": EVERY * SYNC_STEPS} | checkpoint,
        snapshot={"segment_dir": str(path.parent)},
    )  # fmt: skip


def forget(run):
    """End a run and remove its workers' states everywhere but in checkpoints."""
    run.end()
    shutil.rmtree(run.run_dir / "state" / "workers")
    for segment in list(run.run_dir.parent.rglob("everstep-*")):
        until(lambda it=segment: shutil.rmtree(it, ignore_errors=True) or not it.exists(), "its keeper to end")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("groups", "mode"), [(3, "async"), pytest.param(1, "disabled", marks=pytest.mark.slow)])
def test_each_group_writes_what_it_carries_and_a_run_of_other_groups_goes_on_from_it(
    start, reference, tmp_path, groups, mode
):
    run = start(toml := config(tmp_path / "run.toml", async_mode=mode), run_dir=tmp_path / "run", pace_s=PACE_S)
    saved = run.wait_for("checkpoint_saved", step=2 * EVERY)["step"]
    forget(run)
    folder = checkpoints(run.run_dir)[saved * SYNC_STEPS]
    parts, owners = workers_in(folder), run.events("commit", step=saved)[0]["owners"]
    assert sorted(parts) == list(range(WORKERS))
    assert len(set(parts.values())) == len(set(owners)) == 2
    assert all(len({owners[worker] for worker in parts if parts[worker] == part}) == 1 for part in parts.values())
    for step, later in checkpoints(run.run_dir).items():
        if step > saved * SYNC_STEPS:
            shutil.rmtree(later)
    again = start(toml, "--groups", str(groups), run_dir=run.run_dir)
    assert again.wait() == 0, again.console()
    told = again.events("training_started")[0]
    assert (told["source"], told["step"]) == ("disk", saved + 1)
    assert worst(again, reference(toml), STEPS) <= 1e-5


@pytest.mark.parametrize("lost", [(1,), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_a_carrier_that_dies_before_its_part_is_written(start, reference, tmp_path, monkeypatch, lost):
    """The group that takes over its workers writes them. If all groups die, the previous checkpoint is loaded."""
    held = tmp_path / "held"
    monkeypatch.setenv("HELD", str(held))
    run = start(toml := config(tmp_path / "run.toml", "held"), run_dir=tmp_path / "run", pace_s=PACE_S)
    before = run.wait_for("checkpoint_saved")["step"]
    held.touch()
    run.until(held.with_suffix(".reached").exists, "the part to be written")
    held.unlink()
    killed = run.kill(*lost)
    at = run.events("commit")[-1]["step"]
    if lost == (1,):
        run.wait_for("checkpoint_saved", killed, step=at // EVERY * EVERY)
    forget(run)
    newest = max(checkpoints(run.run_dir))
    assert (newest > before * SYNC_STEPS) == (lost == (1,))
    again = start(toml, run_dir=run.run_dir)
    assert again.wait() == 0, again.console()
    assert again.events("training_started")[0]["step"] == newest // SYNC_STEPS + 1
    assert worst(again, reference(toml), STEPS) <= 1e-5


@pytest.mark.slow
def test_a_part_without_room_costs_the_checkpoint_and_not_the_room_of_the_others(start, tmp_path, monkeypatch):
    held = tmp_path / "held"
    monkeypatch.setenv("HELD", str(held))
    run = start(config(tmp_path / "run.toml", "held", rounds=400), pace_s=PACE_S)
    run.wait_for("checkpoint_saved")
    held.write_text("full")
    failed = run.wait_for("checkpoint_failed", group=1)
    assert "No space left" in failed["reason"]
    held.unlink()
    run.wait_for("checkpoint_saved", failed["t"], step=failed["step"] + EVERY)
    run.end()
    assert failed["step"] * SYNC_STEPS not in checkpoints(run.run_dir)
    waiting = [path.name for path in (run.run_dir / "checkpoint").glob("writing-[0-9]*")]
    assert not [name for name in waiting if int(name.split("-")[1]) <= failed["step"] * SYNC_STEPS]


def peak_mb(pid):
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e3


@pytest.mark.slow
def test_writing_and_reading_take_no_more_memory_with_more_workers(start, tmp_path):
    """Each group carries one worker. Compared is the peak of all trainers from a start to its second checkpoint."""
    peaks = {}
    for workers in (2, 4):
        (folder := tmp_path / str(workers)).mkdir()
        toml = config(folder / "run.toml", "wide", workers=workers, rounds=400)
        for start_number in (1, 2):
            run = start(toml, "--groups", str(workers), run_dir=folder / "run")
            first = run.wait_for("checkpoint_saved")["step"]
            run.wait_for("checkpoint_saved", step=first + EVERY)
            peaks[workers, start_number] = max(peak_mb(run.workers(group)[0]) for group in range(workers))
            forget(run)
        assert run.events("training_started")[0]["source"] == "disk"
    print("workers, start: MB", peaks)
    for number in (1, 2):
        assert peaks[4, number] - peaks[2, number] < 136 / 2
