"""`exact = true`: with any faults and any number of groups, the bits are those of the run without faults."""

import os
import random
import shutil
import time

import pytest
from torch.distributed.checkpoint import FileSystemReader

from everstep.report import score
from everstep.titan.same import compare
from watched import everstep, write_config

DILOCO = {"method": "diloco", "workers": 3, "sync_steps": 4}
EXACT, ON = {"module": "exact_job", "config": "debugmodel"}, {"enable": True}
SHAPES = {
    "steps": {"job": EXACT, "snapshot": ON, "attention_check": ON},
    "flips": {"job": {"module": "faulty_job", "config": "debugmodel"}},
    "experts": {"job": {"module": "tiny_llama", "config": "tiny_moe"}, "snapshot": ON},
    "bfloat16": {  # tied and frozen weights, no clipping, and the schedule ends
        "job": EXACT, "snapshot": ON, "lr_scheduler": {"warmup_steps": 1, "total_steps": 8},
        "training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16", "max_norm": 1e9},
    },
    "rounds": {"semi_sync": DILOCO, "training": {"global_batch_size": 6}, "checkpoint": {"interval": 8}},
}  # fmt: skip
SHAPES["fragments"] = SHAPES["rounds"] | {"semi_sync": DILOCO | {"fragments": 2, "overlap_steps": 1}}
STEPS_OF_COMMIT = {"rounds": 4, "fragments": 2}
"""Shape -> steps of a commit; 1 for other shapes."""

SLOTS = 7
SLOW = pytest.mark.slow


def config_of(folder, shape, *, steps, ranks=1, **more):
    """Write a config. Each slot has one row for each of the group's ranks."""
    sections = SHAPES[shape] | more
    training = {"global_batch_size": SLOTS} | sections.get("training", {})
    training["global_batch_size"] *= ranks
    sections["training"] = training | {"steps": steps}
    sections["fault_tolerance"] = {"exact": True, "audit_interval": 1} | sections.get("fault_tolerance", {})
    return write_config(folder / f"{shape}.toml", **sections)


def sick(monkeypatch, fault):
    """Give group 1 of runs started from now on this fault of `faulty_job`."""
    for name, value in (("FAULT", fault), ("SHARE", 1.0), ("SICK", 1)):
        monkeypatch.setenv(f"EVERSTEP_TEST_{name}", str(value))


def flip_a_weight(folder):
    """Flip the lowest bit of one element in a checkpoint's file, as if it had flipped before the file was written."""
    (folder / "__0_0.distcp.xxh3").unlink()
    stored = FileSystemReader(folder).read_metadata().storage_data
    where = next(info for index, info in stored.items() if index.fqn == "output.weight" or "wq.weight" in index.fqn)
    with (folder / where.relative_path).open("r+b") as file:
        file.seek(where.offset + where.length // 2 // 4 * 4)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def replayed(run_dir, step, *more):
    """Run `everstep replay` in a new process, and return its exit status and output."""
    done = everstep("replay", run_dir, "--step", step, *more, cwd=run_dir.parent)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("shape", "victims", "ranks"), [
    ("steps", (0, 1), 1), ("rounds", (1,), 1),
    pytest.param("fragments", (1,), 1, marks=SLOW),
    pytest.param("experts", (0, 1), 1, marks=SLOW),
    pytest.param("bfloat16", (0, 1), 2, marks=SLOW),
])  # fmt: skip
def test_two_groups_that_are_killed_make_the_bits_of_one_that_is_not(start, tmp_path, shape, victims, ranks):
    config, each = config_of(tmp_path, shape, steps=8, ranks=ranks), ("--ranks-per-group", str(ranks))
    clean, hit = start(config, "--groups", "1", *each), start(config, "--groups", "2", *each)
    hit.wait_for("commit", step=1)
    killed, is_step = hit.kill(*victims, ranks=slice(-1, None)), shape not in STEPS_OF_COMMIT
    if is_step:  # two rounds may be over before the group is back
        hit.wait_for("training_started", after=killed, group=1)
    assert [clean.wait(), hit.wait()] == [0, 0], hit.console()
    found = compare(clean.run_dir, hit.run_dir)
    assert (found.diverged, found.differing) == ("", "")
    assert found.steps == found.checksums - 1 == 8 // STEPS_OF_COMMIT.get(shape, 1)
    assert (found.checkpoint, found.tensors > 50) == (8, True)
    told = replayed(hit.run_dir, 7 if is_step else 2)
    assert told[0] == 0, told
    assert "loss and gradient norm: the same bits" in told[1]
    assert told[1].count("the bits that group") == (SLOTS * ranks if is_step else 0)


def test_a_replay_names_the_slots_of_a_group_whose_arithmetic_was_wrong(start, tmp_path, monkeypatch):
    """The replay starts from a checkpoint with the wrong earlier steps. One slot alone can be replayed too."""
    saved = {"interval": 4, "folder": str(tmp_path / "saved"), "exclude_from_loading": ["dataloader"]}
    config = config_of(tmp_path, "flips", steps=6, checkpoint=saved, fault_tolerance={"min_groups": 2})
    sick(monkeypatch, "flip")
    run = start(config, "--groups", "2")
    assert run.wait() == 0, run.console()
    sick(monkeypatch, "")
    status, told = replayed(run.run_dir, 5)
    owners = run.events("commit", step=5)[0]["owners"]
    assert status == 1
    assert "from checkpoint/step-4" in told
    for slot, owner in enumerate(owners):
        says = "OTHER BITS than those" if owner == 1 else "the bits"
        assert f"slot {slot}, rank 0: {says} that group {owner} committed" in told
    status, told = replayed(run.run_dir, 5, "--slot", str(owners.index(0)))
    assert (status, told.count("slot ")) == (0, 1)
    flip_a_weight(tmp_path / "saved" / "step-4")
    status, told = replayed(run.run_dir, 5)
    assert (status, "the checkpoint of step 4 is damaged: its parameters have" in told) == (2, True), told


WRONG = {
    # what is flipped -> fault of faulty_job, number of groups, and the settings of their audits
    "every product": ("flip", 3, {"audit_interval": 0, "audit_slots": 1.0}),
    "one gradient's sum": ("sum", 2, {"audit_interval": 50}),
    "a weight": ("weight", 3, {"audit_interval": 0, "audit_slots": 1.0}),
}


@pytest.fixture(scope="module")
def without_flips(start, tmp_path_factory):
    return start(config_of(tmp_path_factory.mktemp("clean"), "flips", steps=6), "--groups", "1")


@pytest.mark.parametrize("wrong", [*list(WRONG)[:2], pytest.param("a weight", marks=SLOW)])
def test_an_audit_finds_a_flipped_bit_and_names_its_group(start, without_flips, tmp_path, monkeypatch, wrong):
    """In the end the state is that of a run in which no bit was flipped."""
    (flip, groups, settings), clean = WRONG[wrong], without_flips
    sick(monkeypatch, flip)
    hit = start(config_of(tmp_path, "flips", steps=6, fault_tolerance=settings), "--groups", str(groups))
    assert [clean.wait(), hit.wait()] == [0, 0], hit.console()
    found = compare(clean.run_dir, hit.run_dir)
    assert (found.differing, found.checkpoint) == ("", hit.events("commit")[-1]["step"])
    losses = [score.loss_by_step(score.account_of(run.run_dir).lineage.final()) for run in (clean, hit)]
    assert losses[0] == losses[1]
    # A group with a wrong weight or sum wrote another checksum of its parameters, and ended after that.
    told_of = flip in ("sum", "weight") and "parameters after step 3" in found.diverged
    assert told_of or (flip != "sum" and found.diverged == "")
    if flip == "sum":  # no slot is computed wrongly
        assert {(event["step"], *event["differing"]) for event in hit.events("audit") if event["differing"]} == {(3, 1)}
        return
    told = hit.events("slot_differs")
    assert told
    assert all(event["step"] >= 3 and 1 in event["groups"] for event in told)
    assert {tuple(event["groups"]) for event in hit.events("slot_wrong")} == {(1,)}
    assert {event["group"] for event in hit.events("unfit")} == {1}


def test_an_operator_that_is_not_deterministic_ends_the_run_in_a_sentence(start, tmp_path):
    job, ft = {"module": "exact_job", "config": "undetermined"}, {"exact": True, "groups": 1}
    run = start(write_config(tmp_path / "operator.toml", job=job, fault_tolerance=ft))
    assert run.wait() == 1
    assert "\ngroup 0, incarnation 0: rank 0 exited with status 64: put_ has no deterministic" in run.console()
    assert "Traceback" not in run.console()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "ranks", "most"), [
    ("steps", 1, 4), ("rounds", 1, 3), ("fragments", 1, 3), ("steps", 2, 2), ("rounds", 2, 2),
])  # fmt: skip
def test_sixty_faults_leave_every_bit_as_it_was(start, tmp_path, shape, ranks, most):
    """Processes, groups, hosts, keepers and all groups at once are killed or stopped. Groups leave and join. The whole
    run dies and is continued with other numbers of groups, once from an older checkpoint."""
    draw, faults, legs, run = random.Random(shape), 0, 0, None
    each = ("--ranks-per-group", str(ranks))
    config = config_of(tmp_path, shape, steps=1_000_000, ranks=ranks)
    while faults < 60:
        legs += 1
        again = {"run_dir": run.run_dir} if run else {}
        run = start(config, "--groups", str(draw.randint(2, most)), *each, **again)
        run.wait_for("commit")
        for part in range(2):
            seed = ("--seed", 2 * legs + part)
            chaos = everstep("chaos", run.run_dir, "--faults", "all", "--every", "2", "--for", "30s", *seed)
            scale = everstep("scale", run.run_dir, "--groups", draw.randint(1, most))
            assert (chaos.returncode, scale.returncode) == (0, 0), (chaos, scale)
        faults += len(run.events("fault"))
        print(f"leg {legs}: {faults} faults, step {run.events('commit')[-1]['step']}", flush=True)
        if faults < 60:
            run.end()
            if legs == 2:
                shutil.rmtree(max(run.run_dir.glob("checkpoint/step-*"), key=lambda path: int(path.name[5:])))
    run.wait_for("commit", after=time.time())
    last = run.stop()
    steps = last * STEPS_OF_COMMIT.get(shape, 1)
    clean = start(config, "--groups", "1", *each, "--steps", str(steps))
    assert clean.wait(1200.0) == 0, clean.console()
    found = compare(clean.run_dir, run.run_dir)
    print(f"{faults} faults in {legs} legs, {found}")
    assert (found.diverged, found.differing, found.checkpoint, found.steps) == ("", "", steps, last)
