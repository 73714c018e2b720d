"""A run's config, read and judged once: by one function, for every command that takes a config.

`prepare` reads the user's file and flags with torchtitan, refuses what cannot work, and settles the rest in the run
directory: `config.toml`, which workers load, and `state/prepared.json`, which everything else of the run takes.
`everstep run` has it done in a fork of its warm process; the other commands start it as a process of its own, since it
imports torchtitan (`prepared`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everstep.config.errors import ConfigError
from everstep.config.sections import FaultTolerance
from everstep.run import typed
from everstep.run.devices import visible
from everstep.run.directory import LaunchError, config_file
from everstep.run.exits import USAGE_EXIT
from everstep.run.files import read_json, read_typed, write_json, write_whole

ADAM_STATES = 2
"""What the optimizers of torchtitan keep for each parameter, of its own type."""
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Order:
    """What to prepare."""

    config: str
    flags: list[str] = field(default_factory=list)
    """torchtitan's; they win over the file."""
    groups: int | None = None
    """None: as many as the file says."""
    ranks: int = 0
    """Of a group, on all of its nodes; 0: the fewest that the config can be computed on."""
    run_dir: str = ""
    """Where the config is settled; empty: it is judged, and nothing is written."""
    allow_dropped: bool = False
    """Whether a converter that a file of torchtitan 0.2 asks for may be left out."""
    here: bool = True
    """Whether this machine is one that trains; a login node need not have a GPU."""
    model: bool = False
    """Whether to say how large the model is."""


@dataclass(frozen=True)
class Model:
    """What `everstep doctor` asks of a model that is built on the meta device."""

    parameters: int
    state_bytes: int
    """Parameters and optimizer state of one group, over all its ranks."""
    memory: str
    """What a rank holds of them and for the run's safety, for people."""
    train_timeout_s: float
    """How long ranks of a group wait for each other."""
    checked: str | None
    """What attention checks cover ("12 of 12"); None: they are off."""
    unchecked: list[str]
    """Some of what they do not."""
    sampled: bool
    """Whether they are made in some of the slots alone."""


@dataclass(frozen=True)
class Prepared:
    """What a run's config says to all that is not a trainer."""

    groups: int
    ranks: int
    """Of a group."""
    seed: int
    steps: int
    """Commits to make."""
    identity: str
    """See `config_identity`."""
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    metrics: dict[str, Any] = field(default_factory=dict)
    """torchtitan's `[metrics]`."""
    devices: list[str] = field(default_factory=list)
    """The GPUs that the run may use, by names as in `devices.VISIBLE`."""
    warnings: list[str] = field(default_factory=list)
    """What the user should know."""
    model: Model | None = None


def prepare(order: Order) -> Prepared:
    """Read, judge and, with a run directory, settle a config.

    Raises:
        ConfigError: a run of it cannot work, or the run directory holds a run of another config.
    """
    from torch import accelerator

    from everstep.config.resolved import config_identity, resolved_toml

    config, ranks, warnings = _judge(order)
    if order.run_dir:
        run_dir = Path(order.run_dir)
        warnings += _refuse_another(config, run_dir)
        write_whole(config_file(run_dir), resolved_toml(config).encode())
    return Prepared(
        groups=config.fault_tolerance.groups,
        ranks=ranks,
        seed=config.debug.seed or 0,
        steps=config.semi_sync.commits(config.training.steps),
        identity=config_identity(config),
        fault_tolerance=config.fault_tolerance,
        metrics={key: value for key, value in asdict(config.metrics).items() if isinstance(value, str | bool)},
        devices=visible(accelerator.device_count()),
        warnings=warnings,
        model=_model(config, ranks) if order.model else None,
    )


def _judge(order: Order) -> tuple[Any, int, list[str]]:
    """The config, the ranks of a group, and what the user should know. Raises ConfigError."""
    from everstep.config.checks import fewest_ranks
    from everstep.quorum.communicator import why_not
    from everstep.titan.cpu import has_accelerator
    from everstep.titan.data.binding import check_files
    from everstep.titan.load import load_config
    from everstep.titan.machine import needs_gpu, why_not_built
    from everstep.titan.trainer import EverstepTrainer

    source, warnings = Path(order.config), list[str]()
    config = load_config(
        source,
        EverstepTrainer.Config,
        order.flags,
        groups=order.groups,
        ranks=order.ranks,
        allow_dropped=order.allow_dropped,
        warnings=warnings,
    )
    ranks = order.ranks or fewest_ranks(config.parallelism)
    ft = config.fault_tolerance
    if not ft.enable and ft.groups > 1:
        raise ConfigError(
            f"{source}: {ft.groups} groups need fault tolerance, or each trains alone: "
            "set [fault_tolerance] enable = true, or give --groups 1"
        )
    check_files(config)
    if order.here and not has_accelerator():
        for problem in needs_gpu(config):
            raise ConfigError(f"{source}: {problem.message}")
    if order.here and ft.enable and (reason := why_not(ft.process_group)):
        raise ConfigError(
            f'{source}: [fault_tolerance] process_group = "{ft.process_group}" {reason}: set it to "gloo"'
        )
    if reason := why_not_built(config):
        raise ConfigError(f"{source}: {reason}")
    return config, ranks, warnings


def _refuse_another(config: Any, run_dir: Path) -> list[str]:
    """Raises ConfigError if `run_dir` holds a run of another config; what to know of going on with it."""
    from everstep.config.resolved import differing_keys
    from everstep.titan.load import load_config
    from everstep.titan.trainer import EverstepTrainer

    settled = config_file(run_dir)
    if not settled.exists():
        return []
    if differing := differing_keys(load_config(settled, EverstepTrainer.Config, check=False), config):
        raise ConfigError(
            f"{run_dir} holds a run of another config: {'; '.join(differing)}. "
            "Give another --run-dir, or undo the changes."
        )
    if config.checkpoint.enable:
        return []
    unless = "unless its snapshots are still in memory, " if config.snapshot.enable else ""
    return [
        f"{run_dir} holds an earlier part of this run, and no checkpoint of it ([checkpoint] enable is false): "
        f"{unless}it begins at step 1 again"
    ]


def _model(config: Any, ranks: int) -> Model:
    from everstep.titan.attention import coverage
    from everstep.titan.machine import built_on_meta, choose_attention, trained_parameters

    choose_attention(config)
    model = built_on_meta(config)
    parameters, size = trained_parameters(model, config)
    state_bytes = parameters * size * (1 + ADAM_STATES)
    checked, unchecked = coverage([model]) if config.attention_check.enable else (None, [])
    return Model(
        parameters=parameters,
        state_bytes=state_bytes,
        memory=memory_of_rank(config, parameters * size / ranks, state_bytes / ranks),
        train_timeout_s=config.comm.train_timeout_seconds,
        checked=checked,
        unchecked=unchecked[:3],
        sampled=config.attention_check.rate() != 1.0,
    )


def memory_of_rank(config: Any, gradients: float, state: float) -> str:
    """docs/transport.md and docs/snapshots.md count these bytes of a rank by their causes."""
    ft, snapshot = config.fault_tolerance, config.snapshot
    held = f"{(state + gradients) / 1e9:.1f} GB of parameters, optimizer's states and gradients"
    if not ft.enable or config.semi_sync.enabled:
        return f"{held} in each rank"
    sums = gradients * (4 if ft.exact else 1)
    host = 4 * gradients
    if snapshot.enable and ft.groups > 1:
        size = min(ft.groups, snapshot.parity_group)
        parity = min(snapshot.parity, size - 1)
        host += state / ft.groups * (3 + 2 * parity / (size - parity))
    return (
        f"{held} and {sums / 1e9:.1f} GB of sums in each rank, {gradients / 1e9:.1f} GB more while a failed "
        f"attempt ends; on its host up to {host / 1e9:.1f} GB for snapshots and a group that heals"
    )


# How it is asked and answered.


def main(order: dict[str, Any]) -> int:
    """Prepare in this process, for `everstep run`, and leave the answer for `take_answer`; returns the exit status."""
    asked = typed.parse(Order, order)
    answer = _answer(asked)
    leave_answer(Path(asked.run_dir), answer)
    return USAGE_EXIT if "error" in answer else 0


def _answer(order: Order) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = str(max(1, order.ranks))  # what the workers will see
    try:
        return asdict(prepare(order))
    except ConfigError as error:
        return {"error": str(error)}


def prepared(order: Order) -> Prepared:
    """What `prepare` says in a process of its own; with a run directory it is left there too. Raises LaunchError."""
    command = [sys.executable, "-m", "everstep.launch.prepare", json.dumps(asdict(order))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"torchtitan was not imported within {TIMEOUT_S:g} s.") from None
    if done.returncode:
        raise LaunchError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise LaunchError(answer["error"])
    if order.run_dir:
        leave_answer(Path(order.run_dir), answer)
    return typed.parse(Prepared, answer)


def settled(config: Path, run_dir: Path, flags: Sequence[str], groups: int | None, ranks: int) -> Prepared:
    """What a process of a batch job is told: what was prepared if `config` is the run directory's own and nothing is
    changed, else prepared here. Raises LaunchError."""
    if config.resolve() == config_file(run_dir).resolve() and not flags:
        found = take_answer(run_dir)
        if isinstance(found, Prepared) and groups in (None, found.groups):
            return found
    return prepared(Order(str(config), list(flags), groups, ranks, str(run_dir)))


def prepared_file(run_dir: Path) -> Path:
    return Path(run_dir) / "state" / "prepared.json"


def leave_answer(run_dir: Path, found: dict[str, Any]) -> None:
    """Say what was prepared, or {"error": sentence}, in the run directory."""
    write_json(prepared_file(run_dir), found)


def take_answer(run_dir: Path) -> Prepared | str:
    """What was prepared in a run directory, or the sentence that says why not; empty if nothing was."""
    found = read_json(prepared_file(run_dir))
    if "error" in found:
        return str(found["error"])
    return read_typed(Prepared, prepared_file(run_dir)) or ""


if __name__ == "__main__":
    from everstep.titan import cpu

    if not cpu.has_accelerator():
        cpu.stand_in()
    print(json.dumps(_answer(typed.parse(Order, json.loads(sys.argv[1])))))
