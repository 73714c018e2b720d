"""What another user of this machine put into shared folders before us is not written through, waited for or believed.

The attacks run as that user (nobody), so they need root here.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from everstep.launch import node
from everstep.snapshot import keepers
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_nobody(code, *words):
    """Run Python of another user's; what it left stays."""
    drop = f"import os, socket, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); os.umask(0)\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", drop + textwrap.dedent(code), *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def shared():
    """A folder like /tmp, but not below pytest's, which others cannot enter. Its sticky bit alone would have the kernel
    refuse some of what is tried (fs.protected_symlinks), which not every kernel does."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-test-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("precious")
    return path


def test_a_probe_overwrites_nobodys_file_through_a_link(shared, precious, tmp_path, monkeypatch):
    """Names were `.fit-HOST-PID`, and whoever was there first could make one a link to a file of root's."""
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    plant = """
        folder, victim, pid = sys.argv[1:]
        for name in (f".fit-{socket.gethostname()}-{pid}", f".clock-{pid}", ".fit-", ".fit"):
            os.symlink(victim, os.path.join(folder, name))
    """
    as_nobody(plant, shared, precious, os.getpid())
    planted = sorted(os.listdir(shared))
    assert node.storage_complaint(None) == ""
    assert precious.read_text() == "precious"
    assert sorted(os.listdir(shared)) == planted, "what was probed with is gone, what was there is not"


def test_a_segment_under_another_users_link_is_none_of_ours(shared, tmp_path):
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    segment = Segment.of(Snapshot(segment_dir=str(shared)), "0123456789abcdef", 0)
    as_nobody("os.symlink(sys.argv[1], sys.argv[2])", ours, segment.path)
    with pytest.raises(SnapshotError, match="belongs to another user"):
        segment.create()
    os.utime(ours, (0, 0))
    assert keepers.sweep(shared) == []
