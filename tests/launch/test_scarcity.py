"""Shortages (disk, processes, descriptors) and a group that keeps failing: none is lost, the cause is reported."""

import errno
import itertools
import json
import os
import re
import resource
import signal
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from everstep.commands.status import status_of
from everstep.launch import restart_rules
from everstep.run import memory
from launched import DEADLINE_S, until
from timeline import Timeline, page_of

ENDLESS = ("--training.steps", "1000000")
TOLD_S = 4.0
"""Seconds from a shortage to its report, unless one that was reported earlier still lasts."""


@pytest.mark.parametrize("shortages", [40, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_launcher_that_has_no_room_for_anything_now_and_then_loses_no_group(start, shortages):
    """Opens, forks and sockets of the launcher fail in bursts of half a second while its workers are killed."""
    run = start(2, 2, *ENDLESS, "--tiny.scarce", str(shortages))
    for group in range(2):
        run.wait_for("commit", group=group)
    done = run.run_dir / "scarce-faults"
    kills = 0
    while not done.exists():
        group = kills % 2
        starts = len(run.events("workers_started", group=group))
        os.kill(run.workers(group)[0], signal.SIGKILL)
        kills += 1
        until(lambda g=group, n=starts: len(run.events("workers_started", group=g)) > n, "it to start again")
    made = json.loads(done.read_text())
    assert len(made) >= shortages
    over = time.time()
    for group in range(2):
        run.wait_for("commit", after=over, group=group)
    assert run.events("agent_ended") == []
    told = run.events("resource_shortage")
    spans = [(one["t"] - TOLD_S, one["t"] + one["again_s"] + TOLD_S) for one in told]
    silent = [(when, what) for when, what in made if not any(begin < when < end for begin, end in spans)]
    assert not silent, f"{len(silent)} of {len(made)} are not told: {silent[:5]}"
    assert "This is retried in" in run.console()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(DEADLINE_S) == 0


def test_a_launcher_without_descriptors_says_so_on_the_console_too(start):
    """Even though it cannot read the events that it would show."""
    run = start(1, 1, *ENDLESS)
    run.wait_for("commit", group=0)
    pid = run.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, before[1]))
    os.kill(run.workers(0)[0], signal.SIGKILL)
    until(lambda: "events: [Errno 24] Too many open files" in run.console(), "the shortage", TOLD_S)
    until(lambda: "group 0: [Errno 24] Too many" in status_of(run.run_dir), "its group, by name once", TOLD_S)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    run.wait_for("commit", after=time.time(), group=0)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(DEADLINE_S) == 0


def test_a_worker_without_descriptors_can_say_what_it_died_of(start):
    run = start(1, 1, *ENDLESS, "--tiny.exhaust")
    assert run.wait_for("workers_died")["error"] == "OSError: [Errno 24] Too many open files"
    run.end()


@pytest.mark.parametrize(("disk", "said"), [
    ({"f_bavail": 0}, "No space left on device"), ({"f_files": 9, "f_favail": 0}, "No space left on device"),
    ({"f_files": 0, "f_favail": 0}, ""), ({"f_flag": os.ST_RDONLY}, "Read-only file system"),
    ({"utime": errno.EROFS}, "Read-only file system"),
])  # fmt: skip
def test_a_disk_that_takes_no_events_is_said_by_status(tmp_path, monkeypatch, disk, said):
    """Some file systems report no number of files: f_files is 0. An error makes one read-only without f_flag."""
    Timeline().add(1000, "run_started", role="supervisor", groups=1, steps=9).write(tmp_path)
    assert "WRONG" not in status_of(tmp_path)
    if refused := disk.get("utime"):
        monkeypatch.setattr(os, "utime", Mock(side_effect=OSError(refused, os.strerror(refused))))
    found = os.statvfs(tmp_path)
    names = ("f_flag", "f_bavail", "f_frsize", "f_files", "f_favail")
    found = SimpleNamespace(**{name: getattr(found, name) for name in names} | disk)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    told = status_of(tmp_path)
    assert f"WRONG   {tmp_path}: {said}. This is retried" in told if said else "WRONG" not in told


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_full_disk_is_said_and_a_group_that_dies_starts_once_there_is_room(start, error):
    run = start(2, 1, *ENDLESS, "--tiny.full")
    run.wait_for("commit", group=1)
    full = run.run_dir.with_suffix(".full")
    full.write_text(str(error))
    until(lambda: f"run directory: [Errno {error}] no room" in run.console(), "the full disk", TOLD_S)
    os.kill(run.workers(1)[0], signal.SIGKILL)
    waits = run.wait_for("resource_shortage", group=1)
    run.wait_for("commit", after=waits["t"] + 8.0, group=0)  # longer than workers and the lighthouse may be silent
    assert run.events("workers_stalled") == run.events("lighthouse_died") == []
    assert [len(run.events(kind, group=1)) for kind in ("workers_started", "workers_died")] == [1, 1]
    full.unlink()
    run.wait_for("commit", after=time.time(), group=1)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(("line", "file"), [
    ("0::/job", "job/memory.events"), ("4:memory:/job", "memory/job/memory.oom_control"), ("0::/job", "memory.events"),
])  # fmt: skip
def test_kills_for_memory_are_counted_in_control_groups_of_both_versions(tmp_path, monkeypatch, line, file):
    """In a container the counts of its own control group are directly below the mount."""
    own, counts = tmp_path / "own", tmp_path / file
    monkeypatch.setattr(memory, "MOUNT", tmp_path)
    monkeypatch.setattr(memory, "PROC", own)
    own.write_text(f"3:cpu,cpuacct:/job\n{line}\n")
    assert restart_rules.oom_kills() == 0
    counts.parent.mkdir(parents=True, exist_ok=True)
    counts.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert restart_rules.oom_kills() == 3


def test_a_group_that_fails_again_and_again_while_another_commits_is_summed_up_and_not_given_up(start):
    run = start(2, 1, *ENDLESS, "--tiny.fail_group", "1")
    told = run.wait_for("group_failing", group=1)
    assert told["count"] == 3
    assert told["reason"].startswith("group 1 has failed 3 times in a row: rank 0 exited with status 1: Runtime")
    run.wait_for("group_failing", group=1, count=6)
    deaths = [event["t"] for event in run.events("workers_died", group=1)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(deaths)]
    assert gaps[-1] > max(4.0, gaps[0]), "it is started again later each time"
    assert run.events("agent_ended") == []
    assert told["reason"].removeprefix("group") in run.console()
    summed_up = re.escape(told["reason"][1:]).replace("3", r"\d+", 1)
    assert re.search(summed_up, status_of(run.run_dir)), "however often it is by now"
    assert re.search(r"has failed \d+ times in a row", page_of(run.run_dir).read_text())
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(DEADLINE_S) == 0
