"""The trainer's rounds beside the papers' formulas, for each way of synchronising, and with workers that move."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semi_runs import DEADLINE_S, semi_config
from watched import environment

CASES = {
    # fragments, overlap_steps, mixing, sync_steps
    "whole, late": (1, 2, 0.25, 4),
    "halves, late": (2, 1, 0.5, 4),
    "quarters, late": (4, 1, 0.5, 8),
    "halves, at once": (2, 0, 0.0, 2),
}
OUTER_ROUNDS = 5


def settings(case):
    fragments, overlap, mixing, sync_steps = CASES[case]
    return {"fragments": fragments, "overlap_steps": overlap, "mixing": mixing, "sync_steps": sync_steps}


def config(path, semi_sync, outer_rounds=OUTER_ROUNDS):
    steps = outer_rounds * semi_sync.get("sync_steps", 3)
    return semi_config(
        path,
        job={"config": "tiny_4"},
        training={"steps": steps},
        semi_sync=semi_sync,
        checkpoint={"enable": False, "interval": None, "keep_latest_k": None},
    )


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory):
    """What came of scenarios, by name: all of them in one process, as starting one takes longer than they do."""

    def _carry_out(scenarios):
        folder = tmp_path_factory.mktemp("one_group")
        todo = []
        for number, (semi_sync, before) in enumerate(scenarios.values()):
            place = folder / str(number)
            place.mkdir()
            rounds = OUTER_ROUNDS * semi_sync.get("fragments", 1)
            path = config(folder / f"{number}.toml", semi_sync)
            todo.append({"config": str(path), "dir": str(place), "rounds": rounds, "before": before})
        (folder / "scenarios.json").write_text(json.dumps(todo))
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "one_group.py"), str(folder / "scenarios.json")],
            env=environment(),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return {
            name: torch.load(folder / str(number) / "out.pt", weights_only=False)
            for number, name in enumerate(scenarios)
        }

    return _carry_out


def worst(found, expected):
    names = expected.parameters
    return max(float((found["parameters"][name] - names[name]).abs().max()) for name in names)


@pytest.fixture(scope="module")
def streamed(carried_out):
    return carried_out({case: (settings(case), {}) for case in CASES})


@pytest.mark.parametrize("case", CASES)
def test_streaming_is_what_the_paper_says(streamed, reference, tmp_path, case):
    found = streamed[case]
    expected = reference(config(tmp_path / "run.toml", settings(case)))
    assert worst(found, expected) <= 1e-6
    assert max(abs(a - b) for a, b in zip(found["losses"], expected.losses, strict=True)) <= 1e-5
    other = reference(config(tmp_path / "other.toml", {"sync_steps": settings(case)["sync_steps"]}))
    assert worst({"parameters": other.parameters}, expected) > 1e-4  # it is not plain DiLoCo's


@pytest.mark.parametrize("case", CASES)
def test_a_sum_begins_while_the_last_worker_still_makes_steps(streamed, case):
    fragments, overlap, _, sync_steps = CASES[case]
    before_the_sum = sync_steps // fragments - overlap
    assert streamed[case]["begun"] == [[before_the_sum]] * (OUTER_ROUNDS * fragments)


@pytest.mark.parametrize("case", CASES)
def test_a_round_sends_its_fragment_once(streamed, case):
    commits = [event for event in streamed[case]["events"] if event["kind"] == "commit"]
    fragments, gradients = CASES[case][0], commits[0]["gradient_bytes"]
    by_round = [event["payload_bytes"] for event in commits]
    for outer in range(OUTER_ROUNDS):  # sums alone: what else the groups tell each other is not here
        assert sum(by_round[outer * fragments : (outer + 1) * fragments]) == gradients


MOVES = {
    "moved": {"3": [["moved", 1]]},
    "moved, and the newest file is lost": {"4": [["moved", 1], ["lost", 1, 3]]},
    "moved, and the newest file is damaged": {"4": [["moved", 2], ["torn", 2, 3]]},
    "healed": {"3": [["healed"]]},
    "healed at once": {"1": [["healed"]]},
}
AGAIN = {
    "moved": [0],
    "moved, and the newest file is lost": [1],
    "moved, and the newest file is damaged": [1],
    "healed": [0, 0, 0, 0],
    "healed at once": [],
}


@pytest.fixture(scope="module")
def moved(carried_out):
    halves, every = settings("halves, late"), {"sync_steps": 2, "keep_every": 3}
    return carried_out(
        {
            **{name: (halves, before) for name, before in MOVES.items()},
            "with files of every third round": (every, {"6": [["moved", 0]]}),
        }
    )


@pytest.mark.parametrize("name", MOVES)
def test_a_worker_that_moves_is_the_same_worker(moved, reference, tmp_path, name):
    expected = reference(config(tmp_path / "run.toml", settings("halves, late")))
    assert worst(moved[name], expected) <= 1e-6
    moves = [event["rounds_again"] for event in moved[name]["events"] if event["kind"] == "worker_moved"]
    assert moves == AGAIN[name]


def test_with_files_of_some_rounds_the_rounds_since_are_made_again(moved, reference, tmp_path):
    found = moved["with files of every third round"]
    assert worst(found, reference(config(tmp_path / "run.toml", {"sync_steps": 2}))) <= 1e-6
    moves = [event["rounds_again"] for event in found["events"] if event["kind"] == "worker_moved"]
    assert moves == [2]
