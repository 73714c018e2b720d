"""Groups of several ranks: each rank column is coded separately, and all ranks of a group make the same decision."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from everstep.run.events import EventLog
from everstep.run.token import run_token
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Notes
from everstep.titan import snapshots
from everstep.titan.snapshots import Snapshots
from snapshot_cluster import state_of, wait_until

GROUPS, RANKS = range(4), range(2)
HOSTS = ((1, 2, 3, 4), (1, 3, 2, 4))
"""Host by rank and group. So groups 0, 2 and 1, 3 are coded together in column 0, and 0, 1 and 2, 3 in column 1."""


class Collectives:
    """Collectives of a group's two ranks, which are threads here."""

    def __init__(self) -> None:
        self._said = [None, None]
        self._all = threading.Barrier(2, timeout=20)

    def gather(self, value):
        self._said[int(threading.current_thread().name)] = value
        self._all.wait()
        said = list(self._said)
        self._all.wait()
        return said

    def least(self, *values):
        return [min(each) for each in zip(*self.gather(values), strict=True)]


def on_both_ranks(do):
    """Call `do` for both ranks of a group at the same time. Returns the results by rank."""

    def as_rank(rank):
        threading.current_thread().name = str(rank)
        return do(rank)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(as_rank, RANKS))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(group, rank) -> its snapshots. There are no keepers; the test writes their notes."""
    collectives = Collectives()
    monkeypatch.setattr(snapshots.KeeperWatch, "of_first", lambda *_: None)
    monkeypatch.setattr(snapshots, "gather_json", collectives.gather)
    monkeypatch.setattr(snapshots, "least_in_group", collectives.least)
    token, run = run_token(tmp_path), {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    where = {"segment_dir": str(tmp_path), "memory_reserve_gb": 0.0}
    settings = Snapshot(interval=1, parity_group=2, coding_timeout_s=0.5, **where)
    for group in GROUPS:
        for rank in RANKS:
            monkeypatch.setenv("RANK", str(rank))
            log = EventLog(tmp_path, group, rank, "worker")
            run[group, rank] = Snapshots(tmp_path, group, "127.0.0.1", settings, token, log)
            run[group, rank]._location = HOSTS[rank][group]
            run[group, rank]._segment.create()
    yield run
    for each in run.values():
        each.close(over=False, leaves=False)


def commit(run, step: int) -> None:
    said = {group: on_both_ranks(lambda rank, group=group: run[group, rank].status()) for group in GROUPS}
    columns = [{group: said[group][rank] for group in GROUPS} for rank in RANKS]
    what = SimpleNamespace(step=step, history=1, able=tuple(GROUPS))
    for group in GROUPS:
        on_both_ranks(lambda rank, group=group: run[group, rank].committed(what, columns[rank], lambda: state_of(step)))
    wait_until(lambda: all(each.copier.idle for each in run.values()))


def write_notes(run, group: int, rank: int, **notes) -> None:
    """Write a keeper's notes on a rank's newest snapshot."""
    copier = run[group, rank].copier
    if copier._newest is not None:
        sequence, now = copier._newest.sequence, time.monotonic()
        copier._segment.write_notes(rank, Notes(now, sequence, settled=True, **notes))


def test_all_ranks_leave_out_the_group_that_some_of_them_waited_for(run):
    """Otherwise different groups would share the next snapshot in each rank column, and it could not be restored."""
    commit(run, 1)
    for group, rank in run:
        if (rank, group) == (1, 0):  # the keeper of group 0's second host lives, and does not take it up
            run[0, 1].copier._segment.write_notes(1, Notes(time.monotonic() + 60))
        elif (rank, group) == (1, 1):
            write_notes(run, group, rank, blamed_group=0)
        else:
            write_notes(run, group, rank, coded=True)
    time.sleep(1.1)
    commit(run, 2)
    assert {each.copier.agreed.members for each in run.values()} == {(1, 2, 3)}
    for group, rank in run:
        write_notes(run, group, rank, coded=True)
    commit(run, 3)
    assert {each.copier.agreed.anchor for each in run.values()} == {(2, 1, "")}
    assert {each.copier.agreed.members for each in run.values()} == {(1, 2, 3)}
