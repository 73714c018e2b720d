"""A run's config, read and judged once: by one function, for every command that takes a config.

`prepare` reads the user's file and flags with torchtitan, refuses what cannot work, and settles the rest in the run
directory: `config.toml`, which workers load, and `state/prepared.json`, which everything else of the run takes.
It imports torchtitan: `everstep run` has it done in a fork of its warm process, the other commands start a process
(`prepared`). Both run `main`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from everstep.config.errors import ConfigError
from everstep.config.sections import FaultTolerance
from everstep.launch.machine import sharing_complaint
from everstep.run import typed
from everstep.run.devices import visible
from everstep.run.directory import LaunchError, config_file, make_run_dir, prepared_file
from everstep.run.exits import USAGE_EXIT
from everstep.run.files import read_json, read_typed, write_json, write_whole
from everstep.run.token import require_own
from everstep.titan.imports import import_all

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
    here: bool = True
    """Whether this machine is one that trains; a login node need not have a GPU."""
    together: bool = False
    """Whether all groups run on this machine."""
    model: bool = False
    """Whether to say how large the model is, and what is to be said of it."""


@dataclass(frozen=True)
class Line:
    """What one look of `everstep doctor` found. `advice` is what to do, "" for nothing."""

    check: str
    verdict: Literal["ok", "warning", "error"]
    found: str
    advice: str = ""


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
    lines: list[Line] = field(default_factory=list)
    """Of the model and of its waits, if that was asked for."""


def prepare(order: Order) -> Prepared:
    """Read, judge and, with a run directory, settle a config.

    Raises:
        ConfigError: a run of it cannot work, or the run directory holds a run of another config.
    """
    from torch import accelerator

    from everstep.config.resolved import config_identity, resolved_toml

    config, ranks, warnings = _judge(order)
    ft, devices = config.fault_tolerance, visible(accelerator.device_count())
    if order.together and (reason := sharing_complaint(devices, ft.groups * ranks, ft.process_group)):
        raise ConfigError(reason)
    if order.run_dir:
        run_dir = Path(order.run_dir)
        warnings += _refuse_another(config, run_dir)
        write_whole(config_file(run_dir), resolved_toml(config).encode())
    return Prepared(
        groups=ft.groups,
        ranks=ranks,
        seed=config.debug.seed or 0,
        steps=config.semi_sync.commits(config.training.steps),
        identity=config_identity(config),
        fault_tolerance=ft,
        metrics={key: value for key, value in asdict(config.metrics).items() if isinstance(value, str | bool)},
        devices=devices,
        warnings=warnings,
        lines=[*_patience(config, ranks), *_lines(config)] if order.model else [],
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
        source, EverstepTrainer.Config, order.flags, groups=order.groups, ranks=order.ranks, warnings=warnings
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


def _patience(config: Any, ranks: int) -> Iterator[Line]:
    """Whether torchtitan's patience for a collective inside of a group of `ranks` outlasts what one of them may wait
    for among the groups. A config whose own waits contradict each other is refused."""
    ft, train_timeout_s = config.fault_tolerance, config.comm.train_timeout_seconds
    longest_s, name = max((ft.quorum_timeout_s, "quorum_timeout_s"), (ft.reduce_timeout_s, "reduce_timeout_s"))
    if ft.enable and ranks > 1 and train_timeout_s <= longest_s:
        found = (
            f"[comm] train_timeout_seconds = {train_timeout_s:g} is no longer than [fault_tolerance] {name} = "
            f"{longest_s:g}: a rank that waits for another group ends its own"
        )
        yield Line("timeouts", "warning", found, f"set train_timeout_seconds above {longest_s:g}")


def _lines(config: Any) -> Iterator[Line]:
    """How large the model is, built on the meta device, and whether `[attention_check]` sees all of it."""
    from everstep.titan.attention import coverage
    from everstep.titan.machine import built_on_meta, choose_attention, trained_parameters

    choose_attention(config)
    model = built_on_meta(config)
    parameters, size = trained_parameters(model, config)
    state_bytes = parameters * size * (1 + ADAM_STATES)
    whole = f"{state_bytes / 1e9:.2f} GB with the optimizer's states"
    yield Line("config", "ok", f"{parameters / 1e6:,.1f} M parameters: {whole} in each group")
    if not config.attention_check.enable:
        return
    checked, unchecked = coverage([model])
    found = f"{checked} linear layers and kernels are checked"
    if config.attention_check.rate() != 1.0:
        found += ", in every slot for extremes alone: a moderate error in a slot that is not drawn is not seen"
    if unchecked:
        advice = "set [attention_check] enable = false: a model that is checked in part does not start"
        yield Line("attention", "error", f"{found}; {', '.join(unchecked[:3])} would not be", advice)
    else:
        yield Line("attention", "ok", found)


# How it is asked and answered.


def main(order: dict[str, Any], *, tells: bool = False) -> int:
    """Prepare in this process. The answer is left for `take_answer` if there is a run directory. `tells`: it is the
    last line on stdout as well; it may name a webhook's address, so not in a log. Returns the exit status."""
    asked = typed.parse(Order, order)
    os.environ["WORLD_SIZE"] = str(max(1, asked.ranks))  # what the workers will see
    try:
        answer = asdict(prepare(asked))
    except ConfigError as error:
        answer = {"error": str(error)}
    if asked.run_dir:
        leave_answer(Path(asked.run_dir), answer)
    if tells:
        print(json.dumps(answer))
    return USAGE_EXIT if "error" in answer else 0


def prepared(order: Order) -> Prepared:
    """What `prepare` says in a process of its own. Raises LaunchError."""
    command = [sys.executable, "-m", "everstep.launch.prepare", json.dumps(asdict(order))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"torchtitan was not imported within {TIMEOUT_S:g} s.") from None
    if done.returncode not in (0, USAGE_EXIT):
        raise LaunchError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise LaunchError(answer["error"])
    return typed.parse(Prepared, answer)


def settled(config: Path, run_dir: Path, flags: Sequence[str], ranks: int) -> Prepared:
    """What a process of a batch job is told: what was prepared if `config` is the run directory's own and nothing is
    changed, else prepared here. Raises LaunchError, also if others can write to the run directory."""
    make_run_dir(run_dir)
    require_own(run_dir)
    if config.resolve() == config_file(run_dir).resolve() and not flags:
        found = take_answer(run_dir)
        if isinstance(found, Prepared) and ranks in (0, found.ranks):
            return found
    return prepared(Order(str(config), list(flags), ranks=ranks, run_dir=str(run_dir)))


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
    import_all()
    sys.exit(main(json.loads(sys.argv[1]), tells=True))
