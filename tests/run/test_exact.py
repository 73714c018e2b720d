"""`exact = true`: whatever fails and however many groups there are, the bits are those of the run without faults."""

import os
import random
import signal
import sys
import time

import pytest
from torch.distributed.checkpoint import FileSystemReader

from everstep.titan.same import compare
from forked import ran
from watched import environment, write_config

DILOCO = {"method": "diloco", "workers": 3, "sync_steps": 4}
SHAPES = {
    "steps": {"snapshot": {"enable": True}, "attention_check": {"enable": True}},
    "flips": {"job": {"module": "flipped_job", "config": "debugmodel"}},
    "rounds": {"semi_sync": DILOCO, "training": {"global_batch_size": 6}, "checkpoint": {"interval": 8}},
}


SLOTS = 7


def config_of(folder, shape, *, steps, **more):
    sections = SHAPES[shape] | more
    sections["training"] = {**sections.get("training", {}), "steps": steps}
    sections["fault_tolerance"] = {"exact": True, "audit_interval": 1}
    return write_config(folder / f"{shape}.toml", **sections)


def flip_a_weight(folder):
    """The lowest bit of one element, in the file."""
    stored = FileSystemReader(folder).read_metadata().storage_data
    where = next(info for index, info in stored.items() if index.fqn == "output.weight" or "wq.weight" in index.fqn)
    with (folder / where.relative_path).open("r+b") as file:
        file.seek(where.offset + where.length // 2 // 4 * 4)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def replayed(run_dir, step, *more):
    """Exit status and words of `everstep replay`, in a process of its own."""
    command = [sys.executable, "-m", "everstep.cli", "replay", str(run_dir), "--step", str(step), *more]
    done = ran(command, env=environment(), cwd=run_dir.parent, timeout=240.0)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("shape", "victims"), [("steps", (0, 1)), ("rounds", (1,))])
def test_two_groups_that_are_killed_make_the_bits_of_one_that_is_not(start, tmp_path, shape, victims):
    config = config_of(tmp_path, shape, steps=8)
    clean, hit = start(config, "--groups", "1"), start(config, "--groups", "2")
    hit.wait_for("commit", step=1)
    killed = hit.kill(*victims)
    if shape == "steps":  # two rounds may be over before the group is back
        hit.wait_for("training_started", after=killed, group=1)
    assert [clean.wait(), hit.wait()] == [0, 0], hit.said()
    found = compare(clean.run_dir, hit.run_dir)
    assert (found.parted, found.differing) == ("", "")
    assert found.steps == found.checksums - 1 == (8 if shape == "steps" else 2)
    assert (found.checkpoint, found.tensors > 50) == (8, True)
    told = replayed(hit.run_dir, 2 if shape == "rounds" else 7)
    assert told[0] == 0, told
    assert "loss and gradient norm: the same bits" in told[1]
    assert told[1].count("the bits that group") == (0 if shape == "rounds" else SLOTS)


def test_a_replay_names_the_slots_of_a_group_whose_arithmetic_was_wrong(start, tmp_path, monkeypatch):
    """From a checkpoint that the wrong steps before are in; also of one slot."""
    config = config_of(tmp_path, "flips", steps=6, checkpoint={"interval": 4})
    monkeypatch.setenv("EVERSTEP_TEST_FLIP", "always")
    run = start(config, "--groups", "2")
    assert run.wait() == 0, run.said()
    monkeypatch.delenv("EVERSTEP_TEST_FLIP")
    status, told = replayed(run.run_dir, 5)
    owners = run.events("commit", step=5)[0]["owners"]
    assert status == 1
    assert "from checkpoint/step-4" in told
    for slot, owner in enumerate(owners):
        says = "OTHER BITS than those" if owner == 1 else "the bits"
        assert f"slot {slot}, rank 0: {says} that group {owner} committed" in told
    status, told = replayed(run.run_dir, 5, "--slot", str(owners.index(0)))
    assert (status, told.count("slot ")) == (0, 1)
    flip_a_weight(run.run_dir / "checkpoint" / "step-4")
    status, told = replayed(run.run_dir, 5)
    assert (status, "the checkpoint of step 4 has other parameters than those" in told) == (2, True), told


def test_an_audit_finds_a_flipped_bit_and_names_its_group(start, tmp_path, monkeypatch):
    """Of a feed-forward product. The state is that of a run in which no bit was flipped."""
    settings = {"exact": True, "audit_interval": 1, "audit_slots": 1.0}
    config = write_config(
        tmp_path / "flipped.toml",
        job={"module": "flipped_job", "config": "debugmodel"},
        training={"steps": 6},
        fault_tolerance=settings,
    )
    clean = start(config, "--groups", "1")
    monkeypatch.setenv("EVERSTEP_TEST_FLIP", "always")
    hit = start(config, "--groups", "3")
    assert [clean.wait(), hit.wait()] == [0, 0], hit.said()
    found = compare(clean.run_dir, hit.run_dir)
    assert (found.parted, found.differing, found.checkpoint) == ("", "", 6)
    told = hit.events("slot_differs")
    assert all(event["step"] >= 3 and 1 in event["groups"] for event in told)
    wrong, unfit = hit.events("slot_wrong"), hit.events("unfit")
    assert told
    assert {tuple(event["groups"]) for event in wrong} == {(1,)}
    assert {event["group"] for event in unfit} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["steps", "rounds"])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_sixty_faults_leave_every_bit_as_it_was(start, tmp_path, shape, ranks):
    """Groups killed, stopped, all of them at once, the whole run, and another number of groups after that."""
    steps, draw = 600, random.Random(7)
    config = config_of(tmp_path, shape, steps=steps)
    clean = start(config, "--groups", "1", "--ranks-per-group", ranks)
    assert clean.wait(1200.0) == 0, clean.said()
    faults, groups = 0, 3
    hit = start(config, "--groups", "3", "--ranks-per-group", ranks)
    while hit.process.poll() is None:
        time.sleep(draw.uniform(0.0, 14.0))
        if hit.process.poll() is not None:
            break
        victims = draw.sample(range(groups), draw.randint(1, groups))
        try:
            hit.kill(*victims, signum=draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
        except ProcessLookupError:
            continue
        faults += 1
        if faults % 15 == 0:
            hit.end()
            groups = draw.choice([1, 2, 3])
            hit = start(config, "--groups", str(groups), "--ranks-per-group", ranks, run_dir=hit.run_dir)
            hit.wait_for("commit")
    assert hit.wait() == 0, hit.said()
    found = compare(clean.run_dir, hit.run_dir)
    print(f"{faults} faults, {found}")
    assert (found.parted, found.differing, found.checkpoint) == ("", "", steps)
    assert faults >= 15
