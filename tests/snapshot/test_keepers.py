"""The keeper's life: when it starts and ends, what it leaves, and that no fault of its surroundings ends it."""

import os
import resource
import shutil
import time
from pathlib import Path

import psutil
import pytest

from everstep.commands.snapshots import Snapshots, snapshots
from everstep.run.directory import LaunchError
from everstep.run.token import own_token
from everstep.snapshot import copier, keeper, keepers, peers, segment
from snapshot_cluster import TIMEOUT, Cluster, assert_is_step, in_keepers, is_zombie, wait_until


def pids_of(run: Cluster) -> list[int]:
    return [place.pid for place in peers.read_places(run.run_dir)]


def test_a_second_keeper_is_not_started():
    with Cluster(1) as run:
        assert [run.start_keeper(0).pid] == pids_of(run)
        found = [
            p.pid for p in psutil.process_iter(["cmdline"]) if str(run.run_dir) in " ".join(p.info["cmdline"] or [])
        ]
        assert found == pids_of(run)


@pytest.mark.parametrize("coded", [False, True])
def test_when_the_run_is_over_nothing_is_left(coded):
    with Cluster(3) as run:
        run.commit(1, scale=60)
        run.wait()
        if coded:
            run.settled(1)
        pids = pids_of(run)
        run.kill_trainers()
        keepers.end_keepers(run.run_dir)
        wait_until(lambda: all(not psutil.pid_exists(pid) or is_zombie(pid) for pid in pids))
        assert not any(run.segment(group).path.exists() for group in run.groups)
        assert peers.read_places(run.run_dir) == []


def test_a_keeper_ends_when_nobody_has_a_use_for_it_or_its_run_has_gone(monkeypatch):
    with Cluster(1, keeper_ttl_s=0.5) as run:
        run.take(1, coded=False)
        run.kill_keeper(0)
        monkeypatch.setattr(keeper, "GONE_S", 0.1)
        it = keeper.Keeper(run.run_dir, run.segment(0), "127.0.0.1", run.settings_of(0))
        try:
            assert it._reason_to_end() == ""
            time.sleep(0.6)
            assert "nobody has spoken for it" in it._reason_to_end()
            it.spoken()
            (run.run_dir / "token").write_text("ab" * 32)
            assert "belongs to another run" in it._reason_to_end()
            shutil.rmtree(run.run_dir)
            assert it._reason_to_end() == "", "a shared file system may hide it for a moment"
            time.sleep(0.2)
            it.spoken()
            assert "has gone" in it._reason_to_end()
        finally:
            it._server.close()


def test_a_keeper_that_a_trainer_has_a_use_for_stays_and_ends_later_and_leaves_nothing():
    with Cluster(1, keeper_ttl_s=1.5, interval=1000) as run:
        [pid] = pids_of(run)
        until, step = time.monotonic() + 3, 0
        while time.monotonic() < until:  # commits without a snapshot
            step += 1
            run.commit(step, settle=False)
            assert psutil.pid_exists(pid)
            time.sleep(0.2)
        wait_until(lambda: is_zombie(pid))
        assert not run.segment(0).path.exists()


def test_a_killed_keeper_is_replaced_and_a_removed_segment_made_anew(monkeypatch):
    for module in (copier, keepers, segment):
        monkeypatch.setattr(module, "KEEPER_SILENT_S", 0.5)
    with Cluster(1) as run:
        watch = keepers.KeeperWatch(run.segment(0), 0, lambda: run.start_keeper(0))
        run.commit(1)
        run.wait()
        run.lose_host(0)
        step, killed = 1, time.monotonic()

        def replaced() -> bool:
            nonlocal step
            step += 1
            run.commit(step)
            run.wait()
            return run.segment(0).read_notes(0).heartbeat > killed

        wait_until(replaced)
        watch.end()
        assert_is_step(run.restore(run.decide()), step)


def test_what_a_keeper_failed_to_verify_does_not_count_and_the_keeper_lives(monkeypatch, tmp_path):
    """The step before was sound, and its keeper had said so."""
    code = """
        import everstep.snapshot.coding as watch
        plain = watch.BufferReader
        def failing(path):
            reader = plain(path)
            if reader.header() and reader.header().step == 2: raise ArithmeticError('by the test')
            return reader
        if '"group": 0' in ' '.join(sys.orig_argv): watch.BufferReader = failing
    """
    in_keepers(monkeypatch, tmp_path, code)
    with Cluster(3, coding_timeout_s=1.0) as run:
        run.take(1)
        run.commit(2)
        run.wait()
        wait_until(lambda: "ArithmeticError" in run.segment(0).read_notes(0).reason)
        word = run.copiers[0].word()
        assert (word.settled, word.coded) == (True, False)
        run.commit(3)
        assert (0, "snapshot_unprotected", 2) in [(g, kind, step) for g, kind, step, _ in run.events]
        run.wait()
        wait_until(lambda: run.segment(1).read_notes(0).settled)


def test_a_keeper_without_descriptors_to_spare_goes_on_and_codes_again_when_it_has_some():
    with Cluster(3, coding_timeout_s=1.0) as run:
        run.take(1)
        pids = pids_of(run)
        before = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (4, before[0][1]))
        for step in (2, 3):  # nothing can be opened, not even a header
            run.commit(step, settle=False)
            run.wait()
        log = run.run_dir / "logs" / "keeper-0.log"
        wait_until(lambda: "Too many open files" in log.read_text())
        assert all(psutil.pid_exists(pid) and not is_zombie(pid) for pid in pids)
        for pid, limits in zip(pids, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        run.all_settled()
        step = 4
        while not all(run.copiers[g].word().coded for g in run.groups):
            run.commit(step)
            run.wait()
            run.all_settled()
            step += 1
        run.lose_host(2)
        found = run.recover(group=1)
        assert found.decision.source == "parity"
        assert_is_step(found.restored, found.decision.step)


def test_connections_and_files_of_a_keeper_stay_few_step_after_step():
    with Cluster(4) as run:
        run.take(*range(1, 6))
        # Standard streams, lock, bell, listener, parity files; of the connections of a coding none stays.
        wait_until(lambda: max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids_of(run)) <= 13)


def test_memory_is_what_the_docs_say_it_is():
    parities = 2
    with Cluster(4, parity=parities) as run:
        run.take(1, 2, 3, 4, scale=40)
        for group in run.groups:
            segment = run.segment(group)
            size = max(header.payload_bytes for header in segment.headers("data", 0) if header)
            taken = sum(path.stat().st_size for kind in ("data", "parity") for path in segment.files(kind, 0)
                        if path.exists())  # fmt: skip
            formula = 2 * size * (1 + parities / (4 - parities))
            assert formula < taken < formula + 4 * (1 << 20) + 4 * (200 << 10)  # a chunk and a header each


def test_what_no_run_owns_is_swept_by_hand_or_by_the_next_keeper_and_what_one_owns_is_not():
    with Cluster(2) as run, Cluster(1) as gone:
        gone.commit(1)
        for site in (run, gone):
            site.kill_trainers()
        run.kill_keeper(1)
        gone.kill_keeper(0)
        root, left = run.segment(1).path.parent, gone.segment(0).path
        moved = root / left.name
        shutil.move(left, moved)
        assert keepers.sweep(run.segment(0).path.parent, 0.0) == [], "it has a keeper"
        assert keepers.sweep(root) == [], "a trainer has touched them just now"
        then = time.time() - 2 * run.settings.keeper_ttl_s
        for path in [*moved.iterdir(), moved]:
            os.utime(path, (then, then))
        run.start_keeper(1)
        wait_until(lambda: not moved.exists())
        run.kill_keeper(1)
        keepers.sweep(root, spared_s=0.0)
        assert not run.segment(1).path.exists()
        assert run.segment(0).path.exists()


def test_another_token_learns_nothing_from_a_keeper():
    with Cluster(1) as run:
        [place] = peers.read_places(run.run_dir)
        held, silent = peers.reachable([place], b"y" * 32, TIMEOUT)
        assert not held
        assert "did not accept the run's token" in silent[place]


def test_a_copy_of_a_run_has_keepers_and_snapshots_of_its_own():
    with Cluster(2) as run:
        token = own_token(run.run_dir)  # as `everstep run` does
        run.take(1, 2)
        copy = run.home / "copy"
        shutil.copytree(run.run_dir, copy)
        assert own_token(copy) != token
        assert own_token(run.run_dir) == token
        assert peers.read_places(copy) == []
        place = keepers.start_keeper(copy, 0, "127.0.0.1", run.settings_of(0))
        assert place.segment != str(run.segment(0).path)
        held, _ = peers.reachable([place], run.token, TIMEOUT)
        assert not held, "it does not know the original's token"
        keepers.end_keepers(copy)
        wait_until(lambda: not Path(place.segment).exists())
        run.kill_trainers()
        run.resumes("memory", 2)
        run.run_dir.rename(run.home / "moved")
        assert own_token(run.home / "moved") == token, "it is the same run in another place"
        (run.home / "moved").rename(run.run_dir)


def test_the_command_says_what_a_start_would_do(capsys):
    with Cluster(3) as run:
        run.take(1, 2)
        command = Snapshots(run_dir=run.run_dir)
        assert snapshots(command, ()) == 0
        run.lose_host(0)
        assert snapshots(command, ()) == 0
        run.lose_host(1)
        assert snapshots(command, ()) == 1
    *said, last = capsys.readouterr().out.splitlines()
    assert said[:2] == ["a start would restore step 2 (memory)", "a start would restore step 2 (parity)"]
    assert "not restorable: step 2: rank 0: no keeper has the part of groups 0, 1" in said[2]
    assert last == "a start would find nothing in memory"
    with pytest.raises(LaunchError, match="is no run directory"):
        snapshots(command, ())
