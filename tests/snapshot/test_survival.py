"""What is lost and what is restored: real keepers, real segments, real deaths."""

import re
import time
from dataclasses import replace

import psutil
import pytest
import torch

from everstep.snapshot import keepers, peers, sources
from everstep.snapshot.agreement import Agreed
from everstep.snapshot.buffer import HEADER_BYTES
from everstep.snapshot.copier import Copier
from everstep.snapshot.layout import State
from everstep.snapshot.recovery import InspectError, describe, inspect, to_json
from everstep.snapshot.restore import RestoreError
from everstep.snapshot.segment import Segment, run_id
from snapshot_cluster import TIMEOUT, Cluster, assert_is_step, damage, is_zombie, wait_until


def test_the_newest_step_is_restored_bit_for_bit_on_every_group():
    with Cluster(3) as run:
        for step in (1, 2, 3):
            run.commit(step)
        run.wait()
        decision = run.decide()
        assert (decision.source, decision.step) == ("memory", 3)
        for group in run.groups:
            assert_is_step(run.restore(decision, group), 3)


def test_each_group_copies_only_its_part():
    with Cluster(4) as run:
        run.commit(1)
        run.wait()
        headers = [run.segment(g).headers("data", 0)[0] for g in run.groups]
        assert sum(h.part[1] - h.part[0] for h in headers) == headers[0].state_bytes
        assert max(h.part[1] - h.part[0] for h in headers) <= headers[0].state_bytes / 4 + 64


@pytest.mark.parametrize(("groups", "parity", "lost"), [(3, 1, 1), (2, 1, 1), (4, 2, 2), (3, 2, 2), (5, 2, 1)])
def test_hosts_lost_within_parity_are_decoded(groups, parity, lost):
    with Cluster(groups, parity=parity) as run:
        run.take(7)
        for group in range(lost):
            run.lose_host(group)
        decision = run.decide()
        assert (decision.source, decision.step) == ("parity", 7)
        restored = run.restore(decision, group=0)
        assert restored.decoded == tuple(range(lost))
        assert_is_step(restored, 7)


def test_one_host_more_than_parity_falls_to_disk_and_says_why():
    with Cluster(3, parity=1) as run:
        run.take(7)
        run.lose_host(0)
        run.lose_host(2)
        decision = run.decide(disk_step=5)
        assert (decision.source, decision.step) == ("disk", 5)
        assert "no keeper has the part of groups 0, 2" in decision.reasons[0]
        assert "cannot be decoded" in decision.reasons[0]
        assert run.decide().source == "nothing"


def test_a_killed_keeper_leaves_its_segment_to_the_next_one():
    with Cluster(2) as run:
        run.commit(4)
        run.wait()
        run.kill_keeper(0)
        run.kill_keeper(1)
        assert run.decide().source == "nothing"
        run.start_keeper(0)
        run.start_keeper(1)
        decision = run.decide()
        assert (decision.source, decision.step) == ("memory", 4)
        assert_is_step(run.restore(decision), 4)


def test_a_second_keeper_is_not_started():
    with Cluster(1) as run:
        first = peers.read_places(run.run_dir)[0]
        again = run.start_keeper(0)
        assert again.pid == first.pid
        keepers = [p for p in psutil.process_iter(["cmdline"]) if str(run.run_dir) in " ".join(p.info["cmdline"] or [])]
        assert [p.pid for p in keepers] == [first.pid]


def test_when_the_run_is_over_nothing_is_left():
    with Cluster(2) as run:
        run.commit(1)
        run.wait()
        pids = [place.pid for place in peers.read_places(run.run_dir)]
        assert keepers.end_keepers(run.run_dir) == []
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        assert not run.segment(0).path.exists()
        assert not run.segment(1).path.exists()
        assert peers.read_places(run.run_dir) == []


def test_a_keeper_ends_when_its_run_directory_is_another_runs():
    with Cluster(1) as run:
        place = peers.read_places(run.run_dir)[0]
        (run.run_dir / "token").write_text("ab" * 32)
        wait_until(lambda: is_zombie(place.pid))
        assert not run.segment(0).path.exists()


def test_a_keeper_that_is_spoken_for_stays():
    with Cluster(1, keeper_ttl_s=1.5) as run:
        place = peers.read_places(run.run_dir)[0]
        until = time.monotonic() + 4
        while time.monotonic() < until:
            run.segment(0).set_mark(0)
            assert psutil.pid_exists(place.pid)
            time.sleep(0.2)


def test_a_keeper_nobody_speaks_for_ends_and_leaves_nothing():
    with Cluster(1, keeper_ttl_s=1.0) as run:
        place = peers.read_places(run.run_dir)[0]
        wait_until(lambda: not psutil.pid_exists(place.pid))
        assert not run.segment(0).path.exists()


def test_a_group_that_dies_in_its_copy_does_not_take_the_step_before_with_it():
    """Group 1 never publishes step 3; the survivors go on, and then everything dies."""
    with Cluster(3, parity=0) as run:
        run.take(1, 2, coded=False)
        words = {g: run.copiers[g].word() for g in (0, 1, 2)}  # before the vote, so the same in all
        for group in (0, 2):  # group 1 is dead before it copied anything of step 3
            state = run.tensors[group]
            run.copiers[group].committed(3, 1, [0, 1, 2], words, lambda state=state: State(state))
        run.wait()
        decision = run.decide()
        assert (decision.source, decision.step) == ("older", 2)
        assert "step 3" in decision.reasons[0]
        # Step 4 is committed without group 1: it must go over step 3, not over step 2.
        run.commit(4, members=[0, 2])
        run.wait()
        steps = {h.step for h in run.segment(0).headers("data", 0) if h}
        assert steps == {2, 4}
        decision = run.decide()
        assert (decision.source, decision.step) == ("memory", 4)
        assert_is_step(run.restore(decision), 4)


def test_the_number_of_groups_may_change_from_step_to_step_and_at_restore():
    with Cluster(3, parity=0) as run:
        run.commit(1)
        run.commit(2, members=[0, 1])
        run.commit(3, members=[1])
        run.commit(4, members=[0, 1, 2])
        run.wait()
        decision = run.decide()
        assert decision.step == 4
        assert_is_step(run.restore(decision, group=17), 4)


def test_parts_of_two_histories_of_one_step_are_never_mixed():
    """Step 5 was committed, lost on group 1, and committed again with other numbers after going back."""
    with Cluster(2, parity=0) as run:
        run.commit(4)
        run.commit(5, seed=1)
        run.wait()
        run.copiers[0].close()
        run.start_copier(0)
        run.commit(5, members=[1], history=2, seed=2)
        run.wait()
        decision = run.decide()
        assert decision.step == 5
        restored = run.restore(decision)
        assert_is_step(restored, 5, seed=2 if restored.history == 2 else 1)


@pytest.mark.parametrize("where", ["part", "layout", "table", "header"])
def test_flipped_bits_are_never_restored(where):
    with Cluster(3, parity=1) as run:
        run.commit(1)
        run.take(2)
        size = run.segment(1).headers("data", 0)[0].payload_bytes
        damage(
            run,
            1,
            "data",
            step=2,
            at={"part": 1234, "layout": size - 1, "table": size + 3, "header": 40 - HEADER_BYTES}[where],
        )
        if where != "header":
            with pytest.raises(RestoreError, match=r"is not what was saved|is not the one"):
                run.restore(run.decide())
        found = run.recover()
        assert found.decision.source == "parity"
        assert found.restored.decoded == (1,)
        assert_is_step(found.restored, 2)


def test_a_keeper_finds_damage_by_itself_and_no_parity_is_coded_over_it():
    with Cluster(2, parity=1) as run:
        run.kill_keeper(1)
        run.commit(1)
        run.wait()
        damage(run, 1, "data", step=1, at=100)
        run.start_keeper(1)
        wait_until(lambda: run.segment(1).read_notes(0).sequence != -1)
        notes = run.segment(1).read_notes(0)
        assert (notes.sound, notes.coded) == (False, False)
        assert "chunks [0] do not match" in notes.reason
        place = next(place for place in peers.read_places(run.run_dir) if place.group == 1)
        held, _ = peers.reachable([place], run.token, TIMEOUT)
        assert [buffer.sound for buffer in held[place]] == [False]
        wait_until(lambda: run.segment(0).read_notes(0).settled)
        assert "the part of group 1 did not come in time" in run.segment(0).read_notes(0).reason
        assert all(header is None for g in run.groups for header in run.segment(g).headers("parity", 0))


def test_what_cannot_be_decoded_gives_way_to_the_older_step():
    with Cluster(3, parity=0) as run:
        run.commit(1)
        run.commit(2)
        run.wait()
        damage(run, 1, "data", step=2, at=999)
        found = run.recover(disk_step=0)
        assert (found.decision.source, found.decision.step) == ("older", 1)
        wrong = "step 2.* (not what was saved|does not match its checksums|is damaged here)"
        assert re.search(wrong, found.decision.reasons[0])
        assert_is_step(found.restored, 1)


def test_damage_that_a_keeper_finds_after_the_decision_is_called_damage():
    """A start asks what there is while the keeper has not verified it; by the time that it fetches, the keeper has."""
    with Cluster(3, parity=0) as run:
        run.take(1, coded=False)
        run.kill_keeper(1)
        run.commit(2, settle=False)
        run.wait()
        damage(run, 1, "data", step=2, at=999)
        run.start_keeper(1)
        wait_until(lambda: run.segment(1).read_notes(0).reason != "")
        unverified = [replace(held, sound=None) for held in run.held()]
        with pytest.raises(RestoreError, match=r"the part of group 1: .* step 2: it is damaged here"):
            run.restore(sources.decide(unverified, run=run_id(run.token)))


def test_another_model_goes_to_disk_with_the_reason():
    with Cluster(2) as run:
        run.commit(2)
        run.wait()
        run.tensors[0] = {**run.tensors[0], "param/w": torch.zeros(300, 258)}
        found = run.recover(disk_step=1)
        assert found.decision.source == "disk"
        assert "param/w is float32 (300, 258) here and was float32 (300, 257)" in found.decision.reasons[0]


def test_a_keeper_that_dies_during_the_run_is_replaced_and_takes_over():
    with Cluster(1) as run:
        emitted = []
        copier = Copier(
            run.segment(0), 0, 1, run.settings_of(0), lambda *a, **k: emitted.append(a), lambda: run.start_keeper(0)
        )
        run.copiers[0].close()
        run.copiers[0] = copier
        run.commit(1)
        run.wait()
        run.kill_keeper(0)
        step, killed = 1, time.monotonic()

        def replaced() -> bool:
            nonlocal step
            step += 1
            run.commit(step)
            run.wait()
            return run.segment(0).read_notes(0).heartbeat > killed

        wait_until(replaced)
        assert_is_step(run.restore(run.decide()), step)
        assert ("snapshot", step) in emitted


def test_without_room_the_snapshot_fails_with_the_numbers_and_the_step_before_stays():
    with Cluster(1) as run:
        run.commit(1)
        run.wait()
        tight = Copier(
            run.segment(0),
            0,
            1,
            replace(run.settings, memory_reserve_gb=1e6),
            lambda *a, **k: run.events.append((a, k)),
        )
        run.copiers[0].close()
        run.copiers[0] = tight
        run.commit(2, scale=9)
        run.wait()
        (kind, step), fields = run.events[-1]
        assert (kind, step) == ("snapshot_failed", 2)
        assert re.search(r"snapshots need \d+ bytes more, and there are 0 .*free", fields["reason"])
        assert_is_step(run.restore(run.decide()), 1)


def test_without_permission_the_snapshot_fails_and_says_where():
    with Cluster(1) as run:
        run.copiers[0].close()
        missing = Segment.of(replace(run.settings, segment_dir=f"{run.home}/nowhere"), "0" * 16, 0)
        run.copiers[0] = Copier(missing, 0, 1, run.settings, lambda *a, **k: run.events.append((a, k)))
        run.commit(1)
        run.wait()
        assert run.events[-1][0] == ("snapshot_failed", 1)
        assert "nowhere" in run.events[-1][1]["reason"]
        assert "snapshot.segment_dir" in run.events[-1][1]["reason"]


def test_another_token_learns_nothing_from_a_keeper():
    with Cluster(1) as run:
        place = peers.read_places(run.run_dir)[0]
        held, silent = peers.reachable([place], b"y" * 32, TIMEOUT)
        assert not held
        assert "did not accept the run's token" in silent[place]


def test_inspection_shows_what_is_held_and_verification_finds_damage():
    with Cluster(3, parity=1) as run:
        run.commit(1)
        run.take(2)
        found = inspect(run.run_dir, verify=True, timeout=TIMEOUT)
        assert found.sound
        text = describe(found)
        assert "a start would restore step 2 (memory)" in text
        assert text.count(" verified") == len(found.held) >= 9
        damage(run, 2, "parity", step=2, at=5)
        found = inspect(run.run_dir, verify=True, timeout=TIMEOUT)
        assert not found.sound
        assert describe(found).count("DAMAGED") == 1
        run.lose_host(0)
        found = inspect(run.run_dir, timeout=TIMEOUT)
        assert to_json(found)["source"] == "parity"


def test_inspecting_what_is_no_run_says_so(tmp_path):
    with pytest.raises(InspectError, match="is no run directory"):
        inspect(tmp_path)


def test_a_healed_group_does_not_overwrite_what_the_others_would_go_back_to():
    """Everything died after step 2. Group 0 restored it from memory, group 1 healed from group 0: in the
    first copy after that, step 2 must survive on both."""
    with Cluster(2, parity=0) as run:
        run.commit(1)
        run.commit(2)
        run.wait()
        for group in run.groups:
            run.copiers[group].close()
            run.start_copier(group)
        run.copiers[0].agreed = Agreed(anchor=(2, 1, ""))
        run.copiers[1].agreed = Agreed.from_json(run.copiers[0].agreed.to_json())
        run.commit(3, history=2)
        run.wait()
        assert [{h.step for h in run.segment(g).headers("data", 0) if h} for g in run.groups] == [
            {2, 3},
            {2, 3},
        ]
        run.commit(4, history=2)
        run.wait()
        assert [{h.step for h in run.segment(g).headers("data", 0) if h} for g in run.groups] == [
            {3, 4},
            {3, 4},
        ]


def test_an_segment_that_is_removed_under_a_run_is_made_anew():
    with Cluster(1) as run:
        run.commit(1)
        run.wait()
        run.lose_host(0)
        run.commit(2)
        run.wait()
        run.start_keeper(0)
        assert_is_step(run.restore(run.decide()), 2)


def test_no_sequence_number_comes_twice_though_the_younger_buffer_is_overwritten():
    with Cluster(2, parity=0) as run:
        run.commit(1)
        run.commit(2)
        run.wait()
        seen = {h.sequence for h in run.segment(0).headers("data", 0) if h}
        run.copiers[0].close()
        run.start_copier(0)
        run.copiers[0].agreed = Agreed(anchor=(1, 1, ""))  # so that it writes over the younger buffer
        run.commit(3, members=[0])
        run.wait()
        headers = [h for h in run.segment(0).headers("data", 0) if h]
        assert {h.step for h in headers} == {1, 3}
        assert max(h.sequence for h in headers) > max(seen)
