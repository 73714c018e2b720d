"""Real keepers and copiers of a small run on one host, for tests."""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from everstep.run.events import EventLog
from everstep.run.token import run_token
from everstep.snapshot import keepers, peers, recovery, restore, sources
from everstep.snapshot.agreement import Agreed
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.copier import Copier
from everstep.snapshot.layout import Layout, State
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from watched import until

TIMEOUT = timedelta(seconds=5)


def state_of(step: int, seed: int = 0, scale: float = 1) -> State:
    """Return a state that is a function of its step: what a restore of this step must return."""
    rows, generator = round(300 * scale), torch.Generator().manual_seed(1000 * seed + step)
    return State(
        tensors={
            "param/w": torch.randn(rows, 257, generator=generator),
            "param/b": torch.randn(257, generator=generator),
            "optimizer/0/exp_avg": torch.randn(rows, 257, generator=generator).to(torch.bfloat16),
            "optimizer/0/step": torch.tensor(float(step)),
            "buffer/none": torch.empty(0, 3),
        },
        meta={"step": step, "lr": 0.5**step},
        blobs={"data": step.to_bytes(8, "little") * 5},
    )


class Cluster(contextlib.AbstractContextManager):
    """Groups of one rank each, `per_host` to a host (a directory). Keepers are processes; copiers are in this one."""

    def __init__(self, groups: int, per_host: int = 1, **settings) -> None:
        self.per_host = per_host
        self.home = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
        self.run_dir = self.home / "run"
        self.run_dir.mkdir()
        self.token = run_token(self.run_dir)
        self.settings = replace(
            Snapshot(enable=True, interval=1, segment_dir=str(self.home), memory_reserve_gb=0.0, coding_timeout_s=5.0),
            **settings,
        )
        self.groups = list(range(groups))
        self.events: list[tuple] = []
        self.logs: dict[int, EventLog] = {}
        self.copiers: dict[int, Copier] = {}
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}
        for group in self.groups:
            self.start_keeper(group)
            self.start_copier(group)

    def __exit__(self, *_) -> None:
        self.kill_trainers()
        for place in peers.read_records(self.run_dir):
            self.kill_keeper(place.group)
        shutil.rmtree(self.home, ignore_errors=True)

    def host_of(self, group: int) -> int:
        return group // self.per_host

    def settings_of(self, group: int) -> Snapshot:
        folder = self.home / f"host-{self.host_of(group)}"
        folder.mkdir(exist_ok=True)
        return replace(self.settings, segment_dir=str(folder))

    def segment(self, group: int) -> Segment:
        return Segment.of(self.settings_of(group), run_id(self.token), group)

    def start_keeper(self, group: int) -> peers.KeeperRecord:
        return keepers.start_keeper(self.run_dir, group, "127.0.0.1", self.settings_of(group))

    def start_copier(self, group: int, **changes) -> None:
        log = self.logs.setdefault(group, EventLog(self.run_dir, group, 0, "worker"))

        def emit(kind: str, step: int | None = None, **fields) -> None:
            self.events.append((group, kind, step, fields))
            log.emit(kind, step, **fields)

        settings = replace(self.settings_of(group), **changes)
        segment = Segment.of(settings, run_id(self.token), group)
        with contextlib.suppress(SnapshotError):
            segment.create()
        self.copiers[group] = Copier(segment, 0, 1, settings, emit)

    def kill_keeper(self, group: int) -> None:
        for place in peers.read_records(self.run_dir):
            if place.group == group:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
                wait_until(lambda: not psutil.pid_exists(place.pid) or is_zombie(place.pid))  # noqa: B023

    def lose_host(self, group: int) -> None:
        """Kill the keeper of a group's host and remove its memory."""
        self.kill_keeper(group)
        self.segment(group).remove()
        for each in self.groups:
            if self.host_of(each) == self.host_of(group):
                peers.record_file(self.run_dir, each).unlink(missing_ok=True)

    def kill_trainers(self) -> None:
        for copier in self.copiers.values():
            copier.close()
        self.copiers.clear()

    def statuses(self, members) -> dict:
        return {g: replace(self.copiers[g].status(), location=1 + self.host_of(g)) for g in members}

    def restart(self, found: recovery.Recovery, start="again", scale: float = 1, history: int | None = None) -> None:
        """Start all trainers again from what was found. They publish it before they go on."""
        restored = found.restored
        for group in self.groups:
            self.start_copier(group)
            self.copiers[group].agreed = Agreed(anchor=found.decision.anchor)
        statuses = self.statuses(self.groups)
        for group in self.groups:
            fresh = state_of(restored.step, 0, scale)
            self.tensors[group] = {n: t.clone() for n, t in fresh.tensors.items()}
            state = State(self.tensors[group], fresh.meta, fresh.blobs)
            moment = (restored.step, history or restored.history, start)
            self.copiers[group].restored(moment, self.groups, statuses, state)

    def commit(self, step: int, members=None, history=1, scale=1.0, seed=0, settle=True, apart_s=0.0) -> None:
        """Commit one step on every member. Waits first for the copies of the snapshot before, as before a vote; with
        `settle` also until the keepers are done with it, as in a long step. `apart_s`: seconds between members."""
        members = members or self.groups
        for group in members:
            self.copiers[group].wait()
        if settle:
            wait_until(lambda: all(self.copiers[group].status().settled for group in members))
        statuses = self.statuses(members)
        for group in members:
            fresh = state_of(step, seed, scale)
            mine = self.tensors.setdefault(group, {n: t.clone() for n, t in fresh.tensors.items()})
            for name, tensor in fresh.tensors.items():  # the optimizer changes tensors in place
                if mine[name].shape != tensor.shape:
                    mine[name] = tensor.clone()
                mine[name].copy_(tensor)
            what = State(mine, fresh.meta, fresh.blobs)
            self.copiers[group].committed(step, history, members, statuses, lambda what=what: what)
            time.sleep(apart_s)

    def take(self, *steps: int, coded: bool = True, **how) -> None:
        """Commit these steps, each after all work on the previous snapshot is done. `how`: arguments of `commit`."""
        for step in steps:
            self.commit(step, **how)
            self.wait()
            self.settled(step, coded)

    def wait(self) -> None:
        """Wait until all snapshots that were begun are published and their events are written."""
        for copier in self.copiers.values():
            copier.wait()
        wait_until(lambda: all(copier.idle for copier in self.copiers.values()))
        for copier in self.copiers.values():
            copier.wait()  # the first call returns when the copy is made; the second writes the event

    def settled(self, step: int, coded: bool = True) -> None:
        """Wait until every keeper that holds `step` has verified it and, if `coded`, published its parity."""

        def done() -> bool:
            for group in self.groups:
                headers = [h for h in self.segment(group).headers("data", 0) if h and h.step == step]
                notes = self.segment(group).read_notes(0)
                if headers and not (notes.settled and notes.sequence == headers[0].sequence):
                    return False
                if headers and coded and not notes.coded:
                    raise AssertionError(f"group {group} did not code step {step}: {notes.reason}")
            return True

        wait_until(done)

    def all_settled(self) -> None:
        """Wait until every group has settled its newest snapshot."""
        wait_until(lambda: all(copier.status().settled for copier in self.copiers.values()))

    def decide(self) -> sources.Decision:
        found, _ = peers.reachable(peers.read_records(self.run_dir), self.token, 6 * TIMEOUT)
        return sources.decide(itertools.chain(*found.values()), run=run_id(self.token), disk_step=None)

    def recover(self, group: int = 0, patience_s: float = 0, timeout: timedelta = TIMEOUT) -> recovery.Recovery:
        layout = Layout.of(self.tensors.get(group) or next(iter(self.tensors.values())))
        waits = {"timeout": timeout, "patience": timedelta(seconds=patience_s)}
        return recovery.recover(self.run_dir, group=group, rank=0, ranks=1, layout=layout, disk_step=None, **waits)

    def resumes(self, source: str, step: int, group: int = 0, **state) -> recovery.Recovery:
        """Recover, and check that the start restores this step from this source. `state`: see `assert_is_step`."""
        found = self.recover(group=group)
        assert (found.decision.source, found.decision.step) == (source, step), found.decision.reasons
        assert_is_step(found.restored, step, **state)
        return found

    def restore(self, decision: sources.Decision, group: int = 0) -> restore.Restored:
        return restore.restore_rank(decision.columns[0], group, self.token, TIMEOUT)


@contextlib.contextmanager
def slowed(run: Cluster, group: int, stopped_s: float = 10_000.0, running_s: float = 0.05):
    """Stop the group's keeper for `stopped_s` and let it run for `running_s` seconds, in turn."""
    pid = next(place.pid for place in peers.read_records(run.run_dir) if place.group == group)
    over = threading.Event()

    def duty() -> None:
        while not over.is_set():
            for signum, wait_s in ((signal.SIGSTOP, stopped_s), (signal.SIGCONT, running_s)):
                with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                    os.kill(pid, signum)
                over.wait(wait_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=duty)
    os.kill(pid, signal.SIGSTOP)  # not only once the thread runs
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def assert_is_step(restored: restore.Restored, step: int, scale: float = 1, seed: int = 0) -> None:
    """Check that the restored state is that of the step, bit for bit."""
    want = state_of(step, seed, scale)
    got = restored.layout.views(torch.from_numpy(restored.flat))
    assert restored.step == step
    assert got.keys() == want.tensors.keys()
    for name, tensor in want.tensors.items():
        assert torch.equal(got[name], tensor), name
    assert restored.meta == want.meta
    assert restored.blobs == want.blobs


def is_zombie(pid: int) -> bool:
    """Return whether all threads of a process have ended: until then it holds its files and their locks."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{pid}/task")) <= 1
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return True


wait_until = functools.partial(until, what="it to come about")
