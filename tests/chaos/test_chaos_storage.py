"""Which file systems may be filled: only those that nobody but the run uses."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from everstep.chaos.storage import why_shared


@pytest.fixture
def mount(tmp_path):
    """A tmpfs of the test's own."""
    place = tmp_path / "mount"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True)
        if made.returncode != 0:
            pytest.skip("mounting a file system needs root")
        stack.callback(subprocess.run, ["umount", place], check=True)
        yield place


def test_the_systems_own_file_systems_are_never_filled(tmp_path):
    assert "others use as well" in why_shared(tmp_path)
    assert "others use as well" in why_shared(Path("/dev/shm"), "everstep-")


def test_one_that_only_the_run_uses_may_be_filled(mount):
    (mount / "everstep-1-0").mkdir()
    assert why_shared(mount, "everstep-1-") is None


def test_one_that_holds_anything_else_is_named(mount):
    (mount / "everstep-1-0").mkdir()
    (mount / "everstep-2-0").mkdir()
    assert "everstep-2-0 is on it" in why_shared(mount, "everstep-1-")
    run = mount / "run"
    run.mkdir()
    assert "is on it" in why_shared(run)


def test_one_that_is_mounted_elsewhere_as_well_is_not_filled(mount, tmp_path):
    folder, elsewhere = mount / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    subprocess.run(["mount", "--bind", folder, elsewhere], check=True)
    try:
        assert "others use as well" in why_shared(elsewhere)
    finally:
        subprocess.run(["umount", elsewhere], check=True)
