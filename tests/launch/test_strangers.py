"""Files that another user of this machine planted in shared folders are not written to, waited for or believed.

The attacks run as that user (nobody), so these tests need root.
"""

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from everstep import cli
from everstep.run.directory import lock_run_dir
from everstep.run.events import EventLog
from everstep.run.files import open_own
from everstep.run.token import own_token
from everstep.snapshot import keepers
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment

NOBODY = 65534
ENTRIES = ((1, 7, -1), (4, 5, -1), (8, 7, NOBODY), (16, 7, -1), (32, 5, -1))  # setfacl -d -m g:NOBODY:rwx
ACL = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in ENTRIES)
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_nobody(code, *words):
    """Run Python code as another user. Files that it makes stay."""
    drop = f"import os, socket, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); os.umask(0)\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", drop + textwrap.dedent(code), *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def shared():
    """A folder that everybody can write to, like /tmp but without its sticky bit, with which some kernels refuse a part
    of the attacks (fs.protected_symlinks). It is not below pytest's folder, which other users cannot enter."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-test-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_a_segment_under_another_users_link_is_none_of_ours(shared, tmp_path):
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    segment = Segment.of(Snapshot(segment_dir=str(shared)), "0123456789abcdef", 0)
    as_nobody("os.symlink(sys.argv[1], sys.argv[2])", ours, segment.path)
    with pytest.raises(SnapshotError, match="belongs to another user"):
        segment.create()
    os.utime(ours, (0, 0))
    assert keepers.sweep(shared) == []


@pytest.fixture
def foreign(shared, tmp_path, monkeypatch):
    """A run directory of another user that names Slurm jobs, and fake commands of Slurm that record their calls."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("squeue", "scancel", "sbatch"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/asked\n")
        (tmp_path / name).chmod(0o755)
    make = """
        for folder in ("events", "state"):
            os.makedirs(os.path.join(sys.argv[1], folder), mode=0o755)
        open(os.path.join(sys.argv[1], "state", "slurm.json"), "w").write('{"groups": "7"}')
        open(os.path.join(sys.argv[1], "events", "supervisor.jsonl"), "w")
    """
    as_nobody(make, shared / "run")
    (shared / "run").chmod(0o755)
    (tmp_path / "run.toml").write_text("")
    return shared / "run"


@pytest.mark.parametrize("words", [
    "run CONFIG --run-dir RUN", "submit CONFIG --run-dir RUN", "agent CONFIG --group 0 --run-dir RUN",
    "lighthouse CONFIG --run-dir RUN", "stop RUN", "scale RUN --groups 2", "chaos RUN --every 5",
])  # fmt: skip
def test_commands_that_act_on_a_run_refuse_another_users(foreign, tmp_path, words, capsys):
    before = sorted(foreign.rglob("*"))
    (foreign / "config.toml").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(words.replace("CONFIG", str(tmp_path / "run.toml")).replace("RUN", str(foreign)).split())
    said = capsys.readouterr().err
    assert (ended.value.code, f"{foreign} belongs to user {NOBODY}" in said) == (2, True), said
    assert sorted(foreign.rglob("*"))[-1:] == before[-1:]
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("mode", [0o2775, 0o1777, 0o777])
def test_a_run_below_a_folder_of_many_is_this_users_alone(shared, mode):
    shared.chmod(mode)
    os.chown(shared, NOBODY, NOBODY)
    with contextlib.suppress(OSError):  # this file system has no ACLs
        os.setxattr(shared, "system.posix_acl_default", ACL)
    before = os.umask(0o002)
    try:
        run_dir = shared / "runs" / "one"
        lock_run_dir(run_dir)
        EventLog(run_dir, 0, 0, "worker").close()
        os.close(open_own(run_dir / "logs" / "group-0" / "rank-0.log"))
        assert own_token(run_dir)
    finally:
        os.umask(before)
    assert [path for path in (run_dir, *run_dir.rglob("*")) if path.stat().st_mode & 0o022] == []
