"""Members that are frozen or without room, of sixteen: protection of the others goes on, and steps without it are
counted."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from everstep.report.protection import Protection
from everstep.snapshot.buffer import HEADER_BYTES
from snapshot.test_faults import frozen
from snapshot_cluster import Cluster, wait_until

GROUPS = 16
"""In two parity groups, of the even and of the odd numbers."""
PART_BYTES = 120_000
"""Room for a part, and not for its parity as well."""


class Tight(Cluster):
    """Some groups' segments are on a tmpfs of their own, of 1 MiB."""

    def __init__(self, groups: int, room: tuple[int, ...], **settings) -> None:
        self._room = room
        super().__init__(groups, **settings)

    def start_keeper(self, group: int):
        path = self.segment(group).path
        if group in self._room and not path.is_mount():
            self.segment(group).create()
            mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", path]
            made = subprocess.run(mount, capture_output=True, check=False)
            if made.returncode:
                self.__exit__()
                pytest.skip("a tmpfs can be mounted by root only")
        return super().start_keeper(group)

    def fill(self, left_bytes: int) -> None:
        """Somebody else takes the rest."""
        for group in self._room:
            path = self.segment(group).path
            free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
            fd = os.open(path / "of-somebody-else", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(fd, 0, max(free - left_bytes, 1))
            os.close(fd)

    def __exit__(self, *_) -> None:
        for group in self._room:
            subprocess.run(["umount", "-l", self.segment(group).path], capture_output=True, check=False)
        super().__exit__()


def step_of(run: Cluster, step: int) -> None:
    run.commit(step)
    run.wait()
    run.all_settled()
    run.events.append((None, "commit", step, {"groups": run.groups}))


def protection(run: Cluster) -> Protection:
    """What the run's events say."""
    found = Protection()
    for group, kind, step, fields in run.events:
        found.take({"kind": kind, "group": group, "rank": 0, "step": step, **fields})
    return found


def uncoded(run: Cluster, group: int) -> str:
    """Why a group's newest snapshot is not coded; "" if it is."""
    notes = run.segment(group).read_notes(0)
    return "" if run.copiers[group].word().coded else f"group {group}: {notes.settled} {notes.reason}"


@contextmanager
def stopped(run: Cluster, groups: tuple[int, ...]) -> Iterator[None]:
    pids = [frozen(run, group) for group in groups]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("still", "full"),
    [((5,), ()), ((5, 7), ()), ((5, 8), ()), ((), (2,)), ((), (2, 4)), ((5,), (3,)), ((5,), (2,))],
    ids=[
        "frozen",
        "two frozen of one parity group",
        "two frozen",
        "full",
        "two full",
        "both of one parity group",
        "both",
    ],
)
def test_the_others_protection_goes_on_and_steps_without_it_are_counted(still, full):
    """A full tmpfs has no room for a second parity: its group holds none of every other step, and is protected."""
    with Tight(GROUPS, full, coding_timeout_s=6.0) as run:
        step_of(run, 1)
        run.fill(PART_BYTES)
        step_of(run, 2)
        assert protection(run).coded == set(range(GROUPS))
        with stopped(run, still):
            for step in (3, 4, 5, 6):
                step_of(run, step)
                assert protection(run).exposed().keys() == set(still)
                assert [uncoded(run, g) for g in run.groups if g not in still and uncoded(run, g)] == []
            assert [found.steps for found in protection(run).exposed().values()] == [4] * len(still)
        wait_until(lambda: all(run.copiers[g].word().coded for g in run.groups), 60)
        step_of(run, 7)
        found = protection(run)
        assert found.exposed() == {}
        assert found.steps == dict.fromkeys(still, 3), "steps 3, 4 and 5; step 6 was coded late"
        taken = {(g, step) for g, kind, step, _ in run.events if kind == "snapshot"}
        assert taken == {(g, step) for g in run.groups for step in range(1, 8)}, "nobody left a step out"
        for group in full:
            there = [path for path in run.segment(group).files("parity", 0) if path.exists()]
            assert sum(path.stat().st_size > HEADER_BYTES for path in there) == 1
        run.lose_host(full[0] if full else 9)
        run.resumes("parity", 7, group=1)


@pytest.mark.slow
def test_a_group_without_room_for_its_part_leaves_it_to_the_others_and_they_are_protected():
    with Tight(GROUPS, (2,), coding_timeout_s=6.0) as run:
        step_of(run, 1)
        run.fill(0)
        for step in (2, 3, 4, 5):
            step_of(run, step)
        failed = [(g, step) for g, kind, step, _ in run.events if kind == "snapshot_failed"]
        assert failed == [(2, 2)]
        assert protection(run).exposed() == {}
        others = [g for g in run.groups if g != 2]
        assert all(run.copiers[g].word().coded for g in others)
        run.lose_host(4)
        run.lose_host(2)
        run.resumes("parity", 5, group=1)


def test_what_fills_up_after_the_buffers_are_there_does_no_harm():
    """Nor does it silence the keeper, whose notes are on the same tmpfs."""
    with Tight(3, (2,)) as run:
        for step in (1, 2):
            step_of(run, step)
        run.fill(0)
        for step in (3, 4):
            step_of(run, step)
            assert [uncoded(run, g) for g in run.groups if uncoded(run, g)] == []
        assert protection(run).coded == {0, 1, 2}
        assert {kind for _, kind, _, _ in run.events} == {"snapshot", "snapshot_protected", "commit"}
