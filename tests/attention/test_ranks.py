"""Groups of two ranks whose attention checks itself: real runs."""

import pytest

from everstep.report import score
from watched import Watched, write_config

SHAPES = {
    "sharded, mixed precision, selective checkpointing": {
        "training": {"global_batch_size": 4, "mixed_precision_param": "bfloat16"},
        "activation_checkpoint": {"mode": "selective"},
    },
    "tensor parallel, full checkpointing": {
        "training": {"global_batch_size": 2},
        "parallelism": {"tensor_parallel_degree": 2},
        "activation_checkpoint": {"mode": "full"},
    },
}
FAULTS = {
    "fault_tolerance": {"allow_faults": True},
    "attention_check.inject": {"kind": "nan", "section": "*.y", "rank": 1, "first_step": 2, "every": 3},
}


def trained(folder, name, sections, *, faults):
    config = write_config(
        folder / f"{name}.toml",
        **sections,
        attention_check={"enable": True, "frequency": 1.0, "mode": "detect"},
        **(FAULTS if faults else {}),
    )
    run = Watched(config, folder / name, "--groups", "1", "--ranks-per-group", "2", "--steps", "6")
    try:
        assert run.wait(600) == 0, run.output.read_text()[-4000:]
    finally:
        run.end()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("sections", SHAPES.values(), ids=SHAPES)
def test_a_finding_on_one_rank_has_the_whole_group_compute_the_slot_again(tmp_path, sections):
    hit = trained(tmp_path, "hit", sections, faults=True)
    refused = {rank: {(e["step"], e["slot"]) for e in hit.events("slot_refused", rank=rank)} for rank in (0, 1)}
    assert {step for step, _ in refused[1]} == {2, 5}
    assert refused[0] == refused[1]
    # What detect mode leaves in place passes on to the other rank where both compute one layer together.
    assert {e["rank"] for e in hit.events("finding")} == ({0, 1} if "parallelism" in sections else {1})
    clean = trained(tmp_path, "clean", sections, faults=False)
    assert not clean.events("finding")
    assert score.curve(hit.run_dir) == score.curve(clean.run_dir)
