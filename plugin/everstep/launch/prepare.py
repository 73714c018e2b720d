"""Reading and checking a run's config: once for a run, and by the same function for every command that takes a config.

`prepare` reads the user's file and flags with torchtitan, refuses a config that cannot work, and writes `config.toml`
to the run directory, for the workers. `main` leaves the result in `state/prepared.json`, for all other processes; a
config that is refused leaves the run's as it was.
`prepare` imports torchtitan. `everstep run` therefore calls it in a fork of its warm process, and the other commands in
a new process (`prepare_in_subprocess`). Both run `main`.
"""

import contextlib
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
from everstep.launch.machine import sharing_complaint, visible_devices, why_not_writable
from everstep.run import typed
from everstep.run.directory import LaunchError, config_file, make_run_dir, prepared_file, refuse_starting, refused_file
from everstep.run.exits import USAGE_EXIT
from everstep.run.files import read_typed, write_json, write_whole
from everstep.run.token import require_own
from everstep.titan.imports import import_all

ADAM_STATES = 2
"""Number of values that torchtitan's optimizers keep for each parameter, of the parameter's dtype."""
TIMEOUT_S = 600.0
SECRET = 0o600
"""Mode of files with the whole config: the address of a webhook is a secret."""


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, and what to check."""

    config: str
    flags: list[str] = field(default_factory=list)
    """torchtitan's flags; they win over the file."""
    groups: int | None = None
    """Number of groups; None: as in the file."""
    ranks: int = 0
    """Number of ranks of a group, on all of its nodes; 0: the fewest that the config allows."""
    run_dir: str = ""
    """Run directory to write to; empty: the config is only checked."""
    here: bool = True
    """Whether this machine trains. If not, as on a login node, it needs no GPU."""
    begins: bool = False
    """Whether nothing of the run lives, so that it may go back to a checkpoint."""
    together: bool = False
    """Whether all groups run on this machine."""
    model: bool = False
    """Whether to fill `Prepared.lines`, for which the model is built on the meta device."""


@dataclass(frozen=True)
class Check:
    """The result of one check of `everstep doctor`. `advice` says what to do; "" if nothing."""

    check: str
    verdict: Literal["ok", "warning", "error"]
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Prepared:
    """What the processes of a run other than its trainers need of the config."""

    groups: int
    ranks: int
    """Number of ranks of a group."""
    seed: int
    steps: int
    """Number of commits to make."""
    identity: str
    """The config's `config_identity`."""
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    metrics: dict[str, Any] = field(default_factory=dict)
    """torchtitan's section `[metrics]`, as far as its values are strings or booleans."""
    devices: list[str] = field(default_factory=list)
    """Names of the GPUs that the run may use, as in `machine.VISIBLE`."""
    warnings: list[str] = field(default_factory=list)
    """Sentences that the user should read."""
    lines: list[Check] = field(default_factory=list)
    """Checks of the model and its attention, if `PrepareOptions.model` asked for them."""


def prepare(options: PrepareOptions) -> Prepared:
    """Read and check a config. With a run directory, also write `config.toml` there.

    Raises:
        ConfigError: a run of the config cannot work, or the run directory holds a run of another config.
    """
    from torch import accelerator

    from everstep.config.resolved import config_identity, resolved_toml
    from everstep.titan.load_once import choose

    config, ranks, warnings = _load_and_check(options)
    home = Path(options.run_dir or Path(options.config).parent)  # of `scale`, too, which writes nothing there
    ran = any(home.glob("events/group-*"))
    begun = ran or any((home / config.checkpoint.folder).glob("step-*"))  # if so, it may not read what it began with
    begin = config.checkpoint.initial_load_path if config.checkpoint.enable else None
    if begin and not begun and "://" not in begin and not Path(begin).is_dir():
        raise ConfigError(f'{options.config}: [checkpoint] initial_load_path = "{begin}" is no folder of a checkpoint')
    ft, devices = config.fault_tolerance, visible_devices(accelerator.device_count())
    if options.together and (reason := sharing_complaint(devices, ft.groups * ranks, ft.process_group)):
        raise ConfigError(reason)
    if options.run_dir:
        run_dir, settled = Path(options.run_dir), config_file(Path(options.run_dir))
        # If it ran, the file is the resolved one of an earlier start.
        if options.together and not ran and settled.exists() and settled.samefile(options.config):
            raise ConfigError(
                f"{settled} would be overwritten by the resolved config: rename it, or give another --run-dir"
            )
        warnings += _refuse_another(config, run_dir)
        if options.together and config.checkpoint.enable and not config.checkpoint.load_only:
            _refuse_folder(run_dir, config.checkpoint.folder)
        if options.begins:
            warnings += choose(config.checkpoint, run_dir)
        write_whole(settled, resolved_toml(config).encode(), mode=SECRET)
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
        lines=list(_check_model(config)) if options.model else [],
    )


def _load_and_check(options: PrepareOptions) -> tuple[Any, int, list[str]]:
    """Return the checked config, the number of ranks of a group, and warnings for the user. Raises ConfigError."""
    from everstep.config.checks import fewest_ranks
    from everstep.quorum.communicator import why_not
    from everstep.titan.cpu import has_accelerator
    from everstep.titan.data.binding import check_files
    from everstep.titan.load import load_config
    from everstep.titan.machine import needs_gpu, why_not_built
    from everstep.titan.trainer import EverstepTrainer

    source, warnings = Path(options.config), list[str]()
    config = load_config(
        source, EverstepTrainer.Config, options.flags, groups=options.groups, ranks=options.ranks, warnings=warnings
    )
    ranks = options.ranks or fewest_ranks(config.parallelism)
    ft = config.fault_tolerance
    if not ft.enable and ft.groups > 1:
        raise ConfigError(
            f"{source}: {ft.groups} groups need fault tolerance, or each trains alone: "
            "set [fault_tolerance] enable = true, or give --groups 1"
        )
    check_files(config, source)
    if options.here and not has_accelerator():
        for problem in needs_gpu(config):
            raise ConfigError(f"{source}: {problem.message}")
    if options.here and ft.enable and (reason := why_not(ft.process_group)):
        raise ConfigError(
            f'{source}: [fault_tolerance] process_group = "{ft.process_group}" {reason}: set it to "gloo"'
        )
    if reason := why_not_built(config):
        raise ConfigError(f"{source}: {reason}")
    return config, ranks, warnings


def _refuse_another(config: Any, run_dir: Path) -> list[str]:
    """Raise ConfigError if `run_dir` holds a run of another config. Return warnings about continuing the run there."""
    from everstep.config.resolved import differing_keys
    from everstep.titan.load import load_config
    from everstep.titan.trainer import EverstepTrainer

    settled = config_file(run_dir)
    if not settled.exists():
        return []
    before = load_config(settled, EverstepTrainer.Config, check=False)
    if differing := differing_keys(before, config):
        raise ConfigError(
            f"{run_dir} holds a run of another config: {'; '.join(differing)}. "
            "Give another --run-dir, or undo the changes."
        )
    old, new = before.checkpoint.folder, config.checkpoint.folder
    if config.checkpoint.enable and old == new:
        return []
    why = "no checkpoint of it is read ([checkpoint] enable is false)"
    if config.checkpoint.enable:
        why = f'its checkpoints are in "{old}", not in [checkpoint] folder = "{new}"'
    again = "without other checkpoints and snapshots of it, it begins at step 1 again"
    return [f"{run_dir} holds an earlier part of this run, and {why}: {again}"]


def _refuse_folder(run_dir: Path, folder: str) -> None:
    """Raise ConfigError if no checkpoint can ever be written to `folder`. A full disk may have room later."""
    with contextlib.suppress(OSError):
        if "://" not in folder and (why := why_not_writable(run_dir / folder)):
            raise ConfigError(f'[checkpoint] folder = "{folder}" cannot be written to: {why}. Give another folder.')


def _check_model(config: Any) -> Iterator[Check]:
    """Yield the size of the model, built on the meta device, and whether `[attention_check]` covers all of it."""
    from everstep.titan.attention import coverage, make_checkable
    from everstep.titan.machine import built_on_meta, choose_attention, trained_parameters

    choose_attention(config)
    model = built_on_meta(config)
    parameters, size = trained_parameters(model, config)
    state_bytes = parameters * size * (1 + ADAM_STATES)
    whole = f"{state_bytes / 1e9:.2f} GB with the optimizer's states"
    yield Check("config", "ok", f"{parameters / 1e6:,.1f} M parameters: {whole} in each group")
    if not config.attention_check.enable:
        return
    make_checkable(model)
    checked, unchecked = coverage([model])
    found = f"{checked} linear layers and kernels are checked"
    if config.attention_check.rate() != 1.0:
        found += ", in every slot for extremes alone: a moderate error in a slot that is not drawn is not seen"
    if unchecked:
        advice = "set [attention_check] enable = false: a model that is checked in part does not start"
        yield Check("attention", "error", f"{found}; {', '.join(unchecked[:3])} would not be", advice)
    else:
        yield Check("attention", "ok", found)


def main(options: dict[str, Any], *, tells: bool = False) -> int:
    """Prepare in this process, and return the exit status. If there is a run directory, leave the result there for
    `read_prepared`. `tells`: also print the answer, the result or {"error"}, as the last line on stdout, which must
    then not be a log: the answer may hold the address of a webhook. Otherwise an error is left in `refused_file`."""
    asked = typed.parse(PrepareOptions, options)
    os.environ["WORLD_SIZE"] = str(max(1, asked.ranks))  # as for the workers
    try:
        answer = asdict(prepare(asked))
    except ConfigError as error:
        answer = {"error": str(error)}
    if tells:
        print(json.dumps(answer))
    if asked.run_dir and not (tells and "error" in answer):
        file = refused_file if "error" in answer else prepared_file
        write_json(file(Path(asked.run_dir)), answer, mode=SECRET)
    return USAGE_EXIT if "error" in answer else 0


def prepare_in_subprocess(options: PrepareOptions) -> Prepared:
    """Run `prepare` in a new process and return its result. Raises LaunchError."""
    command = [sys.executable, "-m", "everstep.launch.prepare", json.dumps(asdict(options))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"checking {options.config} with torchtitan took longer than {TIMEOUT_S:g} s.") from None
    if done.returncode not in (0, USAGE_EXIT):
        raise LaunchError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise LaunchError(answer["error"])
    return typed.parse(Prepared, answer)


def read_or_prepare(config: Path, run_dir: Path, flags: Sequence[str], ranks: int) -> Prepared:
    """Return what a process of a batch job needs of the config. If `config` is the run directory's `config.toml`, and
    neither `flags` nor `ranks` change it, this is what was prepared before; otherwise prepare it now. Raises
    LaunchError, also if others can write to the run directory."""
    make_run_dir(run_dir)
    require_own(run_dir)
    if config.resolve() == config_file(run_dir).resolve() and not flags:
        found = read_prepared(run_dir)
        if found and ranks in (0, found.ranks):
            return found
    return prepare_in_subprocess(PrepareOptions(str(config), list(flags), ranks=ranks, run_dir=str(run_dir)))


def read_prepared(run_dir: Path) -> Prepared | None:
    """Return what was prepared last in a run directory; None if nothing was, or the file is damaged."""
    return read_typed(Prepared, prepared_file(run_dir))


def require_prepared(run_dir: Path) -> Prepared:
    """Like `read_prepared`. Raises LaunchError if there is none."""
    if found := read_prepared(run_dir):
        return found
    refuse_starting(run_dir)
    raise LaunchError(f"{prepared_file(run_dir)} is missing or damaged: start the run again.")


if __name__ == "__main__":
    import_all()
    sys.exit(main(json.loads(sys.argv[1]), tells=True))
