"""A host's free memory is shared by all processes that make copies."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from everstep.quorum import memory
from everstep.run import files

CLAIM = """
import sys
from pathlib import Path
from everstep.quorum import memory
memory.CLAIMS = Path(sys.argv[1])
with memory.room_for(1000) as has_room:
    print(has_room, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def free(tmp_path, monkeypatch):
    """Says how much is free, and claims are in a directory of the test."""
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
    assert has_room(1000)


def test_links_of_another_user_are_not_followed(tmp_path):
    """The folder's name can be known, and anybody can make it."""
    trap, victim = tmp_path / "trap", tmp_path / "victim"
    trap.mkdir()
    victim.write_text("dear")
    (trap / "turn.lock").symlink_to(victim)
    memory.CLAIMS.symlink_to(trap)
    assert has_room(1000)
    assert victim.read_text() == "dear"
    assert list(trap.iterdir()) == [trap / "turn.lock"]
