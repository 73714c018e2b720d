"""File systems that are full, and which may be filled: only those that nobody but the run uses."""

import os
import shutil
import subprocess
from pathlib import Path

from everstep.chaos import storage
from everstep.chaos.storage import LEFT_BYTES, FullDisk, FullSharedMemory, _fill, why_shared
from everstep.chaos.view import View
from everstep.run.token import run_token
from everstep.snapshot.peers import Place, write_place
from everstep.snapshot.room import make_room
from everstep.snapshot.segment import Segment, run_id
from watched import Watched, write_config


def test_the_systems_own_file_systems_are_never_filled(tmp_path):
    assert "others use as well" in why_shared(tmp_path)
    assert "others use as well" in why_shared(Path("/dev/shm"), ("everstep-",))


def test_one_that_only_the_run_uses_may_be_filled(mount):
    segment = mount("segment", "8m")
    (segment / "everstep-1-0").mkdir()
    assert why_shared(segment, ("everstep-1-",)) is None


def test_a_tmpfs_in_which_the_runs_own_ranks_found_room_may_be_filled(mount, tmp_path):
    tmpfs = mount("segment", "8m")
    segment = Segment(tmpfs, run_id(run_token(tmp_path)), 0)
    segment.create()
    make_room(tmpfs, segment.path, 0, 1 << 20, 0, 0)
    write_place(tmp_path, Place(0, "localhost", "127.0.0.1:1", os.getpid(), str(segment.path), 0.0))
    assert FullSharedMemory().never(View(tmp_path)) is None
    Segment(tmpfs, "another", 0).create()
    assert "others use as well" in FullSharedMemory().never(View(tmp_path))


def test_a_disk_with_checkpoints_of_the_run_may_be_filled(mount, tmp_path):
    folder = mount("disk", "8m") / "checkpoint"
    (folder / "step-10").mkdir(parents=True)
    (tmp_path / "config.toml").write_text(f'[checkpoint]\nenable = true\nfolder = "{folder}"\n')
    view = View(tmp_path)
    assert FullDisk().place(view) == folder
    assert FullDisk().never(view) is None


def test_the_machines_own_place_is_not_filled_though_it_is_empty(mount, monkeypatch):
    place = mount("shm", "8m")
    assert why_shared(place) is None
    monkeypatch.setattr(storage, "SYSTEM_MOUNTS", {place})
    assert "others use as well" in why_shared(place)


def test_one_that_holds_anything_else_is_named(mount):
    place = mount("place", "8m")
    (place / "everstep-1-0").mkdir()
    (place / "everstep-2-0").mkdir()
    assert "everstep-2-0 is on it" in why_shared(place, ("everstep-1-",))
    run = place / "run"
    run.mkdir()
    assert "is on it" in why_shared(run)


def test_one_that_is_mounted_elsewhere_as_well_is_not_filled(mount, tmp_path):
    folder, elsewhere = mount("place", "8m") / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    subprocess.run(["mount", "--bind", folder, elsewhere], check=True)
    try:
        assert "others use as well" in why_shared(elsewhere)
    finally:
        subprocess.run(["umount", elsewhere], check=True)


def test_all_is_taken_though_others_write_meanwhile(mount):
    place = mount("place", "8m")
    (place / "theirs").write_bytes(bytes(3 << 20))
    with (place / "filler").open("wb") as file:
        _fill(file.fileno(), 8 << 20)  # what was free before they wrote
    assert shutil.disk_usage(place).free < LEFT_BYTES


def test_a_checkpoint_that_does_not_fit_costs_nothing_but_itself(mount, tmp_path):
    disk = mount("disk", "1m")
    config = write_config(
        tmp_path / "full.toml",
        training={"steps": 16},
        checkpoint={"interval": 4, "folder": str(disk / "checkpoint")},
        fault_tolerance={"groups": 2},
    )
    run = Watched(config, tmp_path / "run")
    try:
        run.wait_for("commit", step=5)
        subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    assert not run.events("workers_died")
    assert 4 not in {event["step"] for event in run.events("checkpoint_saved")}
    logs = "".join(path.read_text() for path in (run.run_dir / "logs").glob("group-*/rank-0.log"))
    assert f"No checkpoint in {disk / 'checkpoint'} of step 4: " in logs
    assert (disk / "checkpoint" / "step-16" / ".metadata").exists()
