"""When a keeper starts and ends, what it serves, and what it leaves behind."""

import contextlib
import os
import shutil
import socket
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from threading import Timer
from unittest.mock import Mock, patch

import pytest

from everstep import wire
from everstep.commands.snapshots import snapshots
from everstep.run.directory import LaunchError
from everstep.run.files import write_json
from everstep.run.token import own_token, run_token
from everstep.snapshot import copier, keeper, keepers, peers, segment
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from everstep.snapshot.worker_states import WorkerStates
from snapshot_cluster import TIMEOUT, Cluster, assert_is_step, wait_until


def test_a_keeper_ends_when_nobody_has_a_use_for_it_or_its_run_has_gone(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with Cluster(1, keeper_ttl_s=2.0) as run:
        run.take(1, coded=False)
        run.kill_keeper(0)
        monkeypatch.setattr(keeper, "GONE_S", 0.1)
        monkeypatch.setattr(keeper, "EMPTY_S", 0.0)
        it = keeper.Keeper(run.run_dir, run.segment(0), "127.0.0.1", run.settings_of(0))
        with contextlib.closing(it._server):
            assert it._reason_to_end() == ""
            wait_until(lambda: "nobody has used it" in it._reason_to_end())
            it._looked_at = time.monotonic() - keeper.STOPPED_S - 1
            assert it._reason_to_end() == "", "it was stopped, as with its job, and so was who uses it"
            with patch.object(keeper, "read_token", side_effect=OSError(116, "Stale file handle")):
                time.sleep(0.2)
                assert it._reason_to_end() == "", "a shared file system's server is away"
            it.note_use()
            run.run_dir.rename(run.home / "moved")
            (run.home / "moved" / "token").chmod(0o640)
            assert it._reason_to_end() == ""
            time.sleep(0.2)
            assert it._reason_to_end() == "", "the user mounts it again, and makes it safe"
            (run.home / "moved").rename(run.run_dir)
            watch = keepers.KeeperWatch(run.run_dir, "", run.settings_of(0), run.segment(0), Mock(), failed := Mock())
            watch.looked.wait()
            assert "chmod 600" in failed.call_args.args[0]
            watch.end()
            (run.run_dir / "token").chmod(0o600)
            (run.run_dir / "token").write_text("ab" * 32)
            assert "belongs to another run" in it._reason_to_end()
            shutil.rmtree(run.run_dir)
            assert it._reason_to_end() == "", "a shared file system may hide it for a moment"
            time.sleep(0.2)
            it.note_use()
            assert "has gone" in it._reason_to_end()


def test_a_group_is_looked_after_only_when_a_start_can_find_its_keeper(monkeypatch, tmp_path, caplog):
    """The run directory is full for a moment. Otherwise a snapshot would count as protected that no start can find."""
    settings = Snapshot(segment_dir=str(tmp_path))
    it = Segment.of(settings, run_id(run_token(tmp_path)), 3)
    it.create()
    it.claim(0)
    keeps = keeper.Keeper(tmp_path, it, "127.0.0.1", settings)
    with contextlib.closing(keeps._server):
        with monkeypatch.context() as full:
            full.setattr(peers, "write_json", Mock(side_effect=OSError(28, "No space left on device")))
            keeps._add_new_ranks()
            keeps._add_new_ranks()
        assert keeps._coders == {}
        assert len(caplog.messages) == 1, "once, however often it is tried"
        keeps._add_new_ranks()
        assert list(keeps._coders) == [(3, 0)]
        with patch.object(Path, "exists", side_effect=OSError(116, "Stale file handle")):
            keeps._add_new_ranks()
        shutil.rmtree(peers.records_dir(tmp_path))
        keeps._add_new_ranks()
        assert [place.group for place in peers.read_records(tmp_path)] == [3]
        monkeypatch.setattr(peers, "ask", lambda *asked: {"pid": os.getpid()})
        assert keepers.find_keeper(tmp_path, 3, settings) is None, "no keeper of this version answers so"
        assert keeps._reason_to_end() == ""
        monkeypatch.setattr(keeper, "EMPTY_S", 0.0)
        assert "nobody has used it" in keeps._reason_to_end(), "a start that failed leaves nothing to keep"


def test_a_killed_keeper_is_replaced_and_a_removed_segment_made_anew(monkeypatch):
    for module in (copier, keepers, segment):
        monkeypatch.setattr(module, "KEEPER_SILENT_S", 0.5)
    with Cluster(1) as run:
        monkeypatch.setenv("RANK", "0")
        watched = run.run_dir, "127.0.0.1", run.settings_of(0), run.segment(0)
        watch = keepers.KeeperWatch(*watched, Mock(), pytest.fail)
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
        run.all_settled()  # the last step may have found the keeper at work, and have no snapshot
        run.take(step + 1, coded=False)
        assert_is_step(run.restore(run.decide()), step + 1)


def test_a_keeper_starts_after_another_one_that_was_still_ending_and_serves_no_other_directory(tmp_path):
    settings = Snapshot(segment_dir=str(tmp_path))
    it = Segment.of(settings, run_id(run_token(tmp_path)), 3)
    it.create()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "keeper-3.log").symlink_to(tmp_path / "mine")
    peers.write_record(tmp_path, peers.KeeperRecord(3, "", "127.0.0.1:9", 4242, "", 0.0))
    Timer(5.0, lambda held: (it.remove(), os.close(held)), [keepers.take_lock(it.path)]).start()
    assert keepers.start_keeper(tmp_path, 3, "127.0.0.1", settings).segment == str(it.path)
    assert not (tmp_path / "mine").exists()
    assert "process 4242" in (tmp_path / "logs" / "keeper-3.log").read_text()
    with pytest.raises(SnapshotError, match=r"everstep-\w+-group-3: stop the run"):
        keepers.start_keeper(tmp_path, 3, "127.0.0.1", replace(settings, failure_domain="group"))
    keepers.end_keepers(tmp_path)


def test_a_copy_of_a_run_has_keepers_and_snapshots_of_its_own():
    with Cluster(2) as run:
        token = own_token(run.run_dir)  # as `everstep run` does
        run.take(1, 2)
        copy = run.home / "copy"
        shutil.copytree(run.run_dir, copy)
        assert own_token(copy) != token
        assert own_token(run.run_dir) == token
        assert peers.read_records(copy) == []
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


def test_the_end_of_a_run_does_not_wait_for_each_host_that_is_off_in_turn(tmp_path):
    run_token(tmp_path)
    with socket.create_server(("", 0)) as off:  # it never answers
        for group in range(12):
            address = f"127.0.0.{1 + group}:{off.getsockname()[1]}"
            peers.write_record(tmp_path, peers.KeeperRecord(group, "off", address, 2, "", 0.0))
        began = time.monotonic()
        keepers.end_keepers(tmp_path, timedelta(seconds=1))
    assert time.monotonic() - began < 6


def test_the_command_says_what_a_start_would_do(capsys):
    with Cluster(3) as run:
        run.take(1, 2)
        run.kill_keeper(2)  # a start's keeper adopts what it held
        assert snapshots(run.run_dir) == 0
        run.lose_host(0)
        assert snapshots(run.run_dir) == 0
        run.lose_host(1)
        assert snapshots(run.run_dir) == 1
    *said, last = capsys.readouterr().out.splitlines()
    assert said[:2] == ["a start would restore step 2 (memory)", "a start would restore step 2 (parity)"]
    assert "not restorable: step 2: rank 0: no keeper has the part of groups 0, 1" in said[2]
    assert last == "a start would find nothing in memory"
    assert not any("disk" in line for line in said), "checkpoints are on disk, where it does not look"
    with pytest.raises(LaunchError, match="is not a run directory"):
        snapshots(run.run_dir)


def test_a_keeper_serves_workers_states_to_other_hosts_and_no_other_file():
    """It serves only regular files with the name of a state, neither links nor other files of the segment."""
    state, name = b"7" * 3_000_000, "worker-3.rank-0.round-12.abc"
    with Cluster(2) as run:
        run.take(1, coded=False)
        (run.segment(0).path / name).write_bytes(state)
        (run.segment(0).path / name.replace("12", "13")).symlink_to(run.run_dir / "token")
        here, there = (WorkerStates(run.run_dir, run.segment(group)) for group in (0, 1))
        assert there.fetch(name.replace("12", "14"), len(state)) is None
        assert there.fetch(name, len(state)) == state, "though another one was looked for just now"
        assert here.fetch(name, len(state)) is None, "it is no other host's"
        stored = run.run_dir / "state" / "workers" / name
        stored.parent.mkdir()
        stored.symlink_to(run.segment(0).path / name)
        assert there.fetch(name, len(state)) == state, "storage that cannot be read does not hide the copy in memory"
        stored.unlink()
        place = peers.read_records(run.run_dir, 0)[0]
        peers.record_file(run.run_dir, 0).unlink()
        write_json(peers.records_dir(run.run_dir) / "group-0@other.json", asdict(place) | {"host": "other"})
        here = WorkerStates(run.run_dir, run.segment(0))
        assert here.fetch(name, len(state)) == state, "a segment has the same path on every host"
        for other, size in ((name, 5), (name.replace("12", "13"), 64), ("bell", 0), ("../../etc/passwd", 1)):
            there = WorkerStates(run.run_dir, run.segment(1))
            assert there.fetch(other, size) is None


def test_a_keeper_takes_copies_of_another_hosts_states_and_nothing_else():
    """States that no other host takes are copied to storage."""
    state, name = b"7" * 3_000_000, "worker-3.rank-0.round-12.abc"
    with Cluster(2) as run:
        run.take(1, coded=False)
        there, storage = run.segment(1).path, run.run_dir / "state" / "workers"
        states = WorkerStates(run.run_dir, run.segment(0))
        for round_ in ("11", "12", "13", "14"):
            assert states.copy(name.replace("12", round_), state)
        copies = sorted(path.name for path in there.glob("worker-*"))
        assert copies == [name.replace("12", round_) for round_ in ("12", "13", "14")]
        assert (there / name).read_bytes() == state
        place = next(place for place in peers.read_records(run.run_dir) if place.group == 1)
        for wrong in ({"name": "../escaped", "size": 4}, {"name": "lock", "size": 4}, {"name": name, "size": -1}):
            with pytest.raises(wire.RefusedError):
                peers.ask(place.address, run.token, {"op": "keep", **wrong}, TIMEOUT)
        assert not storage.exists()
        run.lose_host(1)
        assert not states.copy(name, state)
        assert (storage / name).read_bytes() == state
        assert WorkerStates(run.run_dir, run.segment(1)).fetch(name, len(state)) == state
