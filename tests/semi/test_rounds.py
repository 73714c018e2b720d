"""The trainer's rounds beside the papers' formulas, for each way of synchronising, and with workers that move."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from semi_runs import DEADLINE_S, WORKERS, semi_config
from watched import environment

OUTER_ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """Settings, what happens before which round (`one_group`), and of workers that moved the rounds made again."""

    fragments: int
    overlap_steps: int
    mixing: float
    sync_steps: int
    before: dict = field(default_factory=dict)
    again: tuple = ()
    more: dict = field(default_factory=dict)
    """Other sections."""
    method: str = "diloco"

    @property
    def semi_sync(self):
        keys = ("method", "fragments", "overlap_steps", "mixing", "sync_steps")
        return {key: getattr(self, key) for key in keys}


HAPPENS = {
    "1": [["healed"]],  # before anything was written
    "3": [["moved", 1]],
    "5": [["moved", 3], ["restarted"]],
    "6": [["healed"]],
    "7": [["moved", 1], ["lost", 1, 6]],
    "9": [["moved", 2], ["torn", 2, 8]],
}
MOVES = {"3": [["moved", 1]], "4": [["moved", 2], ["lost", 2, 3]], "5": [["moved", 1], ["replaced"]]}
STREAMS = {"job": {"config": "tiny_streams"}, "data": {"source": "dataloader"}}
CHECKED = {
    "attention_check": {"enable": True, "mode": "detect", "frequency": 1.0},
    "fault_tolerance": {"allow_faults": True},
    "attention_check.inject": {"kind": "nan", "first_step": 3, "every": 1000},
}
CASES = {
    "the whole, late": Case(1, 2, 0.25, 4, before={"5": [["moved", 0], ["lost", 0, 4]]}, again=(1,)),
    "halves, late, while workers move": Case(2, 2, 0.5, 6, before=HAPPENS, again=(0, 0, 0, 0, 0, 1, 1)),
    "experts, while workers move": Case(
        2,
        1,
        0.5,
        4,
        before=HAPPENS,
        again=(0, 0, 0, 0, 0, 1, 1),
        more={"job": {"config": "tiny_moe"}},
    ),
    "streams of a dataloader, while workers move": Case(
        1, 0, 0.0, 2, before=MOVES, again=(0, 1, 0, 0, 0, 0), more=STREAMS
    ),
    "an attention that is checked": Case(1, 1, 0.5, 2, more=CHECKED),
}
MORE = {
    "local SGD": Case(1, 0, 0.0, 3, method="local_sgd"),
    "quarters, late": Case(4, 1, 0.5, 8),
    "halves, at once": Case(2, 0, 0.0, 2),
    "local parameters thrown away": Case(2, 2, 0.0, 6),
    "two rounds made again": Case(
        1,
        0,
        0.0,
        2,
        before={"4": [["moved", 3], ["lost", 3, 3]], "5": [["moved", 3], ["lost", 3, 4], ["lost", 3, 3]]},
        again=(1, 2),
    ),
}


def model_of(semi_sync):
    """One with a layer for each fragment."""
    return "tiny_4" if semi_sync.get("fragments", 1) > 2 else "tiny"


def config(path, semi_sync, more=()):
    steps = OUTER_ROUNDS * semi_sync["sync_steps"]
    sections = {
        "job": {"config": model_of(semi_sync)},
        "training": {"steps": steps, "global_batch_size": WORKERS},
        "semi_sync": semi_sync,
        "optimizer": {"lr": 3e-4, "eps": 1e-4},
        "checkpoint": {"interval": 1000 * semi_sync["sync_steps"]},
    }
    return semi_config(path, **sections | dict(more))


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory):
    """What came of scenarios, by name: all of them in one process, as starting one takes longer than they do."""

    def _carry_out(scenarios):
        folder = tmp_path_factory.mktemp("one_group")
        todo = []
        for number, case in enumerate(scenarios.values()):
            place = folder / str(number)
            place.mkdir()
            path = folder / f"{number}.toml"
            config(path, case.semi_sync, case.more)
            todo.append(
                {"config": str(path), "dir": str(place), "rounds": OUTER_ROUNDS * case.fragments, "before": case.before}
            )
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


@pytest.fixture(scope="module")
def few(carried_out):
    return carried_out(CASES)


@pytest.fixture(scope="module")
def more(carried_out):
    return carried_out(MORE)


def worst(parameters, expected):
    """Largest difference, relative where a parameter is above 1: an embedding's are up to 4, where float32 has steps of
    5e-7."""
    return max(
        float(((parameters[name] - tensor).abs() / tensor.abs().clamp(min=1)).max())
        for name, tensor in expected.parameters.items()
    )


def is_what_the_paper_says(found, case, reference, folder):
    expected = reference(config(folder / "run.toml", case.semi_sync, case.more))
    assert worst(found["parameters"], expected) <= 1e-6
    assert max(abs(a - b) for a, b in zip(found["losses"], expected.losses, strict=True)) <= 1e-5
    model = {"job": {"config": model_of(case.semi_sync)}, **dict(case.more)}
    plain = reference(config(folder / "plain.toml", {"sync_steps": case.sync_steps}, model))
    if case.method == "local_sgd" or case.fragments > 1 or case.mixing:
        assert worst(plain.parameters, expected) > 1e-4
    moves = [event["rounds_again"] for event in found["events"] if event["kind"] == "worker_moved"]
    assert tuple(moves) == case.again


@pytest.mark.parametrize("name", CASES)
def test_streaming_is_what_the_paper_says_whoever_carries_the_workers(few, reference, tmp_path, name):
    is_what_the_paper_says(few[name], CASES[name], reference, tmp_path)


def test_groups_tell_each_other_where_their_streams_stand(few):
    """What a group that takes a worker over knows of its streams: all but the rounds that it makes again."""
    assert few["streams of a dataloader, while workers move"]["told"] == [
        (2 * rounds, dict.fromkeys(range(WORKERS), 2 * rounds)) for rounds in (2, 3, 4)
    ]


def test_the_experts_balance_moves(few):
    biases = [t for name, t in few["experts, while workers move"]["parameters"].items() if "expert_bias" in name]
    assert len(biases) == 2  # layers
    assert all(float(bias.abs().max()) > 1e-3 for bias in biases)


def test_a_slot_that_is_refused_is_computed_again_within_its_round(few):
    events = few["an attention that is checked"]["events"]
    refused = [event for event in events if event["kind"] == "slot_refused"]
    assert [(event["step"], event["slot"]) for event in refused] == [(2, 0)], "the third inner step"
    assert {event["step"] for event in events if event["kind"] == "finding"} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_so_are_other_ways_to_synchronise(more, reference, tmp_path, name):
    is_what_the_paper_says(more[name], MORE[name], reference, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_a_sum_begins_while_the_last_worker_still_makes_steps(few, name):
    case = CASES[name]
    begins_after = case.sync_steps // case.fragments - case.overlap_steps
    assert few[name]["begun"] == [[begins_after]] * (OUTER_ROUNDS * case.fragments)


@pytest.mark.parametrize("name", CASES)
def test_what_travels_in_an_outer_round_is_the_model_once(few, name):
    commits = [event for event in few[name]["events"] if event["kind"] == "commit"]
    fragments, by_round = CASES[name].fragments, [event["payload_bytes"] for event in commits]
    for outer in range(OUTER_ROUNDS):  # sums alone: what else groups tell each other is not here
        assert sum(by_round[outer * fragments : (outer + 1) * fragments]) == commits[0]["gradient_bytes"]
