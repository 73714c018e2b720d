"""Whole runs on the stand-in accelerator: a CPU's losses, nothing that no event orders, no wait without need."""

from collections import Counter
from pathlib import Path

import pytest

from everstep.report import score
from everstep.run.files import read_json
from watched import Watched, write_config

from .devices import LateRun

ENDLESS = ("--steps", "1000000")
PACE_S = 0.3
EACH_STEP = {
    ("reduction.py", "all_within"): "whether the sums are finite",
    ("slot_computer.py", "tokens_and_losses"): "the losses of the step's slots",
    ("steps.py", "update"): "the gradient's norm",
}
"""Where the trainer's thread waits for the device in each healthy step, once, and what for."""
NOW_AND_THEN = {
    ("state.py", "digest"): "a commit whose checksum is compared",
    ("work.py", "apply"): "torchtitan's other timeouts, after the first commit",
    ("group.py", "_everyones"): "a state that is looked for",
    ("cpu_attention.py", "matrix_mask"): "attention without kernels, which is the stand-in's",
}


@pytest.fixture
def start(tmp_path):
    """Starts a run of `kind` in a directory of its own; ends it with the test."""
    runs = []

    def _start(kind, name, *args, pace_s=0.0, **sections):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name / "run.toml", **sections)
        runs.append(kind(config, tmp_path / name / "run", *args, pace_s=pace_s))
        return runs[-1]

    yield _start
    for one in runs:
        one.end()


def table(**sections):
    """Of a run without checkpoints; its snapshots are there to be taken from the device."""
    base = {
        "training": {"global_batch_size": 6},
        "optimizer": {"implementation": "foreach"},  # a fused one is a kernel of the device's
        "checkpoint": {"enable": False},
        "snapshot": {"enable": True},
        "fault_tolerance": {"groups": 2},
        "metrics": {"log_freq": 1},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in base.keys() | sections.keys()}


def on_device(sections):
    """For NCCL stands tests/device/late/column.py."""
    return {**sections, "fault_tolerance": {**sections["fault_tolerance"], "process_group": "nccl"}}


def assert_as_on_a_cpu(late, start, *args, **sections):
    """Stop `late`: it has the losses of a whole run on a CPU, no access was unordered, and no work was lost."""
    steps = late.stop()
    inner = steps * sections.get("semi_sync", {}).get("sync_steps", 1)
    alone = {**sections, "snapshot": {"enable": False}, "checkpoint": {"enable": False}}
    reference = start(Watched, "cpu", "--groups", "1", "--steps", str(inner), *args, **alone)
    assert reference.wait(600) == 0, reference.console()
    figures = score.score(late.run_dir, reference.run_dir)
    assert (figures["status"], figures["first_step"], figures["last_step"]) == ("stopped", 1, steps)
    assert figures["loss_delta_steps"] == steps
    assert figures["loss_delta_undefined"] == 0
    assert figures["loss_delta_max"] <= 1e-6, "relative to the run on a CPU"
    assert (figures["samples_lost"], figures["samples_repeated"], figures["replicas_diverged"]) == (0, 0, 0)
    assert late.races() == []


def test_a_group_dies_and_heals_on_a_device(start):
    late = start(LateRun, "late", *ENDLESS, pace_s=PACE_S, **on_device(table()))
    late.wait_for_step((0, 1))
    killed = late.kill(1)
    started = late.wait_for("training_started", after=killed, group=1)
    assert started["source"] == "peer"
    late.wait_for_step((0, 1), after=started["t"])
    assert_as_on_a_cpu(late, start, **table())
    assert late.events("snapshot", group=0)
    assert late.connected_in() == {"connect"}, "a gradient's hook would wait for the slowest group"
    assert read_json(late.run_dir / "state" / "prepared.json")["devices"] == ["0"]
    [survivor] = late.workers(0)
    # The trainer's thread waited for the device where it is known to, each in one attempt once.
    waits, attempts = late.waits(survivor), late.events("attempt", group=0)
    counted = Counter(place(frames) for _, frames in waits if any("driver.py" in frame for frame in frames))
    assert counted.keys() - NOW_AND_THEN.keys() == EACH_STEP.keys()
    assert all(counted[where] <= len(attempts) for where in EACH_STEP), (counted, len(attempts))


def place(frames):
    """File and function of the plugin's own that a wait is in."""
    for frame in frames:
        path, _, function = frame.rpartition(" ")
        if "/plugin/everstep/" in path and not function.startswith("<"):
            return Path(path.rpartition(":")[0]).name, function
    return "", ""


SHAPES = {
    "hsdp": (2, {}),  # replicas are groups
    "tp": (2, {"parallelism": {"tensor_parallel_degree": 2}}),
    "fsdp and tp": (4, {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}}),
    "checkpoints": (1, {"checkpoint": {"enable": True, "interval": 20}}),
    "exact sums": (1, {"fault_tolerance": {"exact": True}}),
    "attention check": (1, {"attention_check": {"enable": True}}),
    "diloco": (
        2,
        {
            "training": {"global_batch_size": 8},
            "semi_sync": {"method": "diloco", "workers": 2, "sync_steps": 2},
            "snapshot": {"enable": False},
            "checkpoint": {"enable": True, "interval": 20},
        },
    ),
}
"""Ranks of a group, and sections."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_a_cpus_losses_under_kills(start, shape):
    ranks, sections = SHAPES[shape]
    sections = table(**sections)
    flags = ("--ranks-per-group", str(ranks))
    late = start(LateRun, "late", *ENDLESS, *flags, pace_s=PACE_S, **on_device(sections))
    after = None
    for number in range(4):
        late.wait_for_step((0, 1), after=after)
        killed = late.kill(number % 2, ranks=slice(ranks - 1, ranks))
        after = late.wait_for("training_started", after=killed, group=number % 2)["t"]
    late.wait_for_step((0, 1), after=after)
    assert_as_on_a_cpu(late, start, *flags, **sections)
