"""Groups of two ranks whose attention checks itself: real runs, and one model under FSDP in two processes."""

import json
import socket
import sys
from pathlib import Path

import pytest

from everstep.report import score
from forked import Forked
from watched import Watched, environment, write_config

HERE = Path(__file__).parent
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


def test_weights_that_fsdp_gathers_and_casts_are_checked(tmp_path):
    """One process a rank; a NaN on rank 1 only, in forward and backward, is repaired and changes no gradient."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        Forked(
            [sys.executable, str(HERE / "fsdp_rank.py"), str(tmp_path / f"{rank}.json")],
            env=environment(
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
            ),
        )
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0]["findings"] == []
    assert [section for section, _ in told[1]["findings"]] == told[1]["hits"]
    assert {action for _, action in told[1]["findings"]} == {"recomputed"}
    for rank in told:
        assert rank["dtypes"] == ["torch.bfloat16"]
        assert not rank["refused"]
        assert rank["difference"] <= 2**-7
