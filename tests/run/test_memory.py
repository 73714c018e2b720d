"""A host's free memory is shared by all processes that make copies."""

import multiprocessing
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from everstep.run import files, memory

CLAIM = """
import sys
from pathlib import Path
from everstep.run import memory
memory.CLAIMS = Path(sys.argv[1])
with memory.room_for(1000) as has_room:
    print(has_room, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def free(tmp_path, monkeypatch):
    """Sets how much host memory is free, and puts claims into a directory of the test."""
    free = SimpleNamespace(available=4000)
    monkeypatch.setattr(memory, "CLAIMS", tmp_path / "claims")
    monkeypatch.setattr(memory, "psutil", SimpleNamespace(virtual_memory=lambda: free))
    return free


def has_room(nbytes):
    with memory.room_for(nbytes) as answer:
        return answer


def test_what_another_process_claims_is_not_free_until_its_copy_is_made_or_it_ends(free):
    command = [sys.executable, "-c", CLAIM, memory.CLAIMS]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "True\n"
    assert [has_room(nbytes) for nbytes in (1999, 2000)] == [True, False], "a copy needs half as much again"
    with memory.room_for(1000) as mine:
        assert mine
        assert not has_room(1400), "of all claims, this process's among them"
    other.kill()
    other.wait()
    assert has_room(2600)
    free.available = 3900
    assert not has_room(2600)


def test_one_that_stands_still_while_it_counts_the_claims_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(memory, "TURN_S", 0.05)
    with files.locked(memory.CLAIMS / "turn"):
        assert not has_room(1000)
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        forked.start()
    assert has_room(1000), "a dataloader's process that was forked meanwhile has no part in it"
    forked.kill()


def test_links_of_another_user_are_not_followed(tmp_path):
    """The folder's name is predictable, and any user can make a link of that name."""
    trap, victim = tmp_path / "trap", tmp_path / "victim"
    trap.mkdir()
    victim.write_text("dear")
    (trap / "turn.lock").symlink_to(victim)
    memory.CLAIMS.symlink_to(trap)
    assert has_room(1000)
    assert (victim.read_text(), list(trap.iterdir())) == ("dear", [trap / "turn.lock"])


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_may_leave_less_than_the_host_has(tmp_path, monkeypatch, free, version):
    """A job's limit is in a folder above its step's group. Page cache counts as free, shared memory does not."""
    mount, proc = tmp_path / "mount", tmp_path / "proc"
    monkeypatch.setattr(memory, "MOUNT", mount)
    monkeypatch.setattr(memory, "PROC", proc)
    proc.write_text("5:cpu:/\n4:memory:/job/step\n" if version == 1 else "0::/job/step\n")
    job = (mount / "memory" if version == 1 else mount) / "job"
    (job / "step").mkdir(parents=True)
    limit, usage, cache, shared = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
        2: ("memory.max", "memory.current", "file", "shmem"),
    }[version]
    for folder, most in ((job, "10000"), (job / "step", str(2**63 - 4096) if version == 1 else "max")):
        (folder / limit).write_text(most)
        (folder / usage).write_text("8000")
        (folder / "memory.stat").write_text(f"{cache} 900\n{shared} 500\n")
    assert memory.free_memory() == (2400, "left under the limit of this control group")
    assert [has_room(nbytes) for nbytes in (1599, 1600)] == [True, False]
    free.available = 2300
    assert memory.free_memory() == (2300, "of free host memory")
