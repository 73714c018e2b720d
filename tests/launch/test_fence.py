"""Which start of a group counts, and what an agent does when another one does."""

import json
import os
import threading
import time

import pytest

from everstep.run import beats, fence
from everstep.run.beats import BeatFile, agent_beat_path, beat_path
from everstep.run.exits import FENCED_EXIT
from everstep.run.fence import Claim, Fenced, claim_group, holder, holds, release
from launched import alive, until


def never():
    return False


def start_claiming(run_dir, claim):
    """A claim in a thread of its own; the list it fills when it has the group."""
    had = []

    def wait():
        claim_group(run_dir, 0, claim, never)
        had.append(claim)

    threading.Thread(target=wait, daemon=True).start()
    return had


def beat(run_dir, age_s=0.0):
    """A sign of life of the group's agent on another host, that long ago by the file server's clock."""
    path = agent_beat_path(run_dir, 0)
    beat_elsewhere(path, "watching")
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


def beat_elsewhere(path, phase, step=0):
    """A beat of a process on another host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beats, "this_boot", lambda: b"another machine.")
        file = BeatFile(path)
        file.beat(phase, step)
        file.close()


@pytest.mark.parametrize(
    ("later", "earlier"), [(Claim(7, 2), Claim(7, 1)), (Claim(8, 0), Claim(7, 5)), (Claim(10, 0), Claim(9, 0))]
)
def test_claims_go_upwards_only(tmp_path, later, earlier):
    claim_group(tmp_path, 0, later, never)
    with pytest.raises(Fenced, match=f"{later.job}.{later.restart}"):
        claim_group(tmp_path, 0, earlier, never)
    assert holder(tmp_path, 0) == later
    assert holds(tmp_path, 0, later)
    assert not holds(tmp_path, 0, earlier)


def test_a_later_start_waits_until_the_earlier_one_has_ended(tmp_path):
    claim_group(tmp_path, 0, Claim(7, 0), never)
    beat(tmp_path)
    had = start_claiming(tmp_path, Claim(7, 1))
    until(lambda: holder(tmp_path, 0) == Claim(7, 1), "the later claim")
    assert not holds(tmp_path, 0, Claim(7, 0)), "the earlier start sees that it lost while the later one still waits"
    for _ in range(10):
        beat(tmp_path)
        fence.time.sleep(0.05)
    assert had == []
    beat(tmp_path, age_s=beats.SHARED_LAG_S + fence.LEASE_S + 1)
    until(lambda: had, "the group")


def test_a_later_start_does_not_wait_for_one_that_said_it_has_ended(tmp_path):
    claim_group(tmp_path, 0, Claim(7, 0), never)
    beat(tmp_path)
    release(tmp_path, 0, Claim(7, 0))
    asked = []
    claim_group(tmp_path, 0, Claim(7, 1), lambda: asked.append(1))
    assert asked == [], "it did not even begin to wait"
    release(tmp_path, 0, Claim(7, 0))
    found = json.loads(fence.fence_file(tmp_path, 0).read_text())
    assert (found["restart"], found["ended"]) == (1, False), "the end of an earlier start leaves a later claim alone"


def test_an_agent_that_was_overtaken_kills_its_workers_and_the_new_one_starts_only_then(agent):
    old = agent("--training.steps", "1000000", job=7, restart=0)
    pids = old.wait_for("workers_started")["pids"]
    old.wait_for("commit")
    new = agent("--training.steps", "1000000", job=7, restart=1)
    assert old.process.wait(60) == FENCED_EXIT
    assert not any(alive(pid) for pid in pids)
    second = until(lambda: old.events("workers_started", incarnation=1), "the new start's workers")[0]
    ended = old.events("agent_ended", status="fenced")[0]
    assert ended["t"] < second["t"]
    assert new.process.poll() is None


def test_a_start_of_a_group_that_runs_is_not_made_twice(agent, tmp_path):
    """Somebody gave the command again."""
    first = agent("--training.steps", "1000000", job=7)
    first.wait_for("commit")
    second = agent("--training.steps", "1000000", job=7)
    assert second.process.wait(60) == FENCED_EXIT
    assert f"is run by process {first.process.pid} on" in second.said()
    assert len(first.events("workers_started")) == 1
    assert not json.loads(fence.fence_file(tmp_path / "run", 0).read_text())["ended"]
    first.process.kill()
    first.process.wait(60)
    agent("--training.steps", "1000000", job=7)
    first.wait_for("workers_started", incarnation=1)


@pytest.mark.parametrize("skew_s", [-200.0, 200.0])
@pytest.mark.parametrize("host", ["this one", "another one"])
def test_no_wall_clock_says_how_old_a_beat_is(tmp_path, monkeypatch, host, skew_s):
    """Another host's beat: by the file server's clock. One of this host: by none of a file system, which is this host's
    wall clock if its disk is its own."""
    path = beat_path(tmp_path, 3, 0)
    if host == "this one":
        BeatFile(path).beat("compute", 7)
        os.utime(path, (then := path.stat().st_mtime + skew_s, then))
    else:
        beat_elsewhere(path, "compute", 7)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew_s)
    ((group, seen, age_s),) = beats.beats_of_groups(tmp_path)
    assert (group, seen.step) == (3, 7)
    assert 0.0 <= age_s < 1.0


def test_a_beat_of_another_host_counts_as_younger_than_it_looks(tmp_path):
    path = beat_path(tmp_path, 3, 0)
    assert beats.age_s(path) is None
    beat_elsewhere(path, "compute", 7)
    os.utime(path, (then := path.stat().st_mtime - beats.SHARED_LAG_S - 5.0, then))
    assert 4.5 < (beats.age_s(path) or 0.0) < 6.0
    (path.parent / ".now").unlink()
    (path.parent / ".now").symlink_to("elsewhere")  # a full disk, or a run directory of somebody else, takes no probe
    assert beats.age_s(path) == 0.0
