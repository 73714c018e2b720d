"""Which file systems may be filled: only those that nobody but the run uses."""

import shutil
import subprocess
from pathlib import Path

from everstep.chaos import storage
from everstep.chaos.storage import LEFT_BYTES, _fill, why_shared


def test_the_systems_own_file_systems_are_never_filled(tmp_path):
    assert "others use as well" in why_shared(tmp_path)
    assert "others use as well" in why_shared(Path("/dev/shm"), "everstep-")


def test_one_that_only_the_run_uses_may_be_filled(mount):
    arena = mount("arena", "8m")
    (arena / "everstep-1-0").mkdir()
    assert why_shared(arena, "everstep-1-") is None


def test_the_machines_own_place_is_not_filled_though_it_is_empty(mount, monkeypatch):
    place = mount("shm", "8m")
    assert why_shared(place) is None
    monkeypatch.setattr(storage, "SYSTEM_MOUNTS", {place})
    assert "others use as well" in why_shared(place)


def test_one_that_holds_anything_else_is_named(mount):
    place = mount("place", "8m")
    (place / "everstep-1-0").mkdir()
    (place / "everstep-2-0").mkdir()
    assert "everstep-2-0 is on it" in why_shared(place, "everstep-1-")
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
