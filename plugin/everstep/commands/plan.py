"""`everstep plan`: how large should a group be, and what will failures cost?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import tyro

from everstep.report.forecast import Choice, Cluster, Costs, Forecast, calibrate, choices
from everstep.run.directory import LaunchError, read_toml

HOUR_S, DAY_S = 3600.0, 86400.0
ROWS = 12
WIDTHS = (11, 6, 6, 7, 6, 6, 8, 6)


@dataclass(kw_only=True)
class Plan:
    """What share of its throughput a run keeps on a cluster that fails, by size of a group and number of spare groups:
    a table, the best first. docs/plan.md has the

    Flags that are not listed here are torchtitan's.
    """

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    nodes: int
    """Nodes of the whole run, spares included."""

    mtbf_hours: float
    """Mean time between failures of one node."""

    ranks_per_node: int = 8
    """Ranks (GPUs) of a node."""

    step_s: float | None = None
    """Seconds of a healthy step on all nodes; or --from a run."""

    rejoin_s: float = 60.0
    """From a group's death until it takes part again."""

    replace_s: float = 600.0
    """Longer that a group is away when no spare group takes its place: until there is another node."""

    start_s: float = 300.0
    """From nothing to the first step."""

    hang_share: float = 0.1
    """Of the failures, those that hang instead of die."""

    all_gone_days: float = 30.0
    """Mean time between moments at which everything is gone at once."""

    from_run: Path | None = None
    """Take step, notice and rejoin times from the events of this run, as far as it had faults."""


def plan(command: Plan, flags: Sequence[str]) -> int:
    """Returns the exit status."""
    from everstep.launch.settings import read_sections

    if command.nodes < 1 or command.mtbf_hours <= 0 or command.ranks_per_node < 1:
        raise LaunchError("--nodes and --ranks-per-node must be at least 1, --mtbf-hours more than 0.")
    sections = read_sections(command.config, flags)
    if command.from_run is not None:
        costs = measured(command.from_run)
    elif command.step_s is not None:
        costs = Costs(step_s=command.step_s)
    else:
        raise LaunchError(
            "--step-s is missing: how long a healthy step takes, or --from-run RUN_DIR to take it from one."
        )
    if command.from_run is None:
        costs = Costs(
            step_s=costs.step_s,
            rejoin_s=command.rejoin_s,
            replace_s=command.replace_s,
            start_s=command.start_s,
        )
    cluster = Cluster(
        nodes=command.nodes,
        node_mtbf_s=command.mtbf_hours * HOUR_S,
        hang_share=command.hang_share,
        all_gone_s=command.all_gone_days * DAY_S,
    )
    ft, snapshot = sections.fault_tolerance, sections.snapshot
    checkpoint = read_toml(command.config).get("checkpoint", {})
    like = Choice(
        snapshot_interval=snapshot.interval if snapshot.enable else 0,
        parity=snapshot.parity,
        checkpoint_steps=int(checkpoint.get("interval", 500)),
        reduce_timeout_s=ft.reduce_timeout_s,
        stall_timeout_s=ft.stall_timeout_s,
    )
    toml = read_toml(command.config)
    training, split = toml.get("training", {}), toml.get("parallelism", {})
    sharing = math.prod(int(split.get(f"{kind}_parallel_degree", 1)) for kind in ("tensor", "context", "pipeline"))

    def slots_of(size: int) -> int:
        """0: the file does not say, or the batch does not divide."""
        rows = int(training.get("local_batch_size", 0)) * max(1, size * command.ranks_per_node // sharing)
        batch = int(training.get("global_batch_size", 0))
        return batch // rows if rows and batch > 0 else 0

    sizes = [size for size in range(1, command.nodes + 1) if command.nodes % size == 0 or command.nodes // size > 2]
    sizes = [size for size in sizes if math.log2(size).is_integer() or command.nodes % size == 0]
    found = choices(cluster, costs, like, sizes, (0, 1, 2, 4), slots_of)
    if not found:
        raise LaunchError(f"{command.config}: no size of a group gives every group a slot of the global batch.")
    if 0 < slots_of(1) < command.nodes:
        print(
            f"note: global_batch_size has {slots_of(1)} slots for groups of one node, fewer than {command.nodes} "
            "nodes: a larger batch allows more groups"
        )
    print(table(found[:ROWS]))
    best, expected = found[0]
    print(
        f"\nbest: {expected.groups} groups of {best.nodes_per_group} node(s), {best.spares} spare(s): "
        f"{100 * expected.kept:.1f} % of the throughput of {command.nodes} nodes that never fail"
    )
    return 0


def table(found: Sequence[tuple[Choice, Forecast]]) -> str:
    """Choices and what is lost to what, in percent."""
    names = zip(("nodes/group", "groups", "spares", "kept", "away", "faults", "all gone", "idle"), WIDTHS, strict=True)
    head = " ".join(f"{name:>{width}}" for name, width in names)
    lines = [head]
    for choice, expected in found:
        parts = (expected.kept, expected.away, expected.faults, expected.all_gone, expected.spares)
        kept, away, faults, gone, idle = (f"{100 * part:.1f} %" for part in parts)
        lines.append(
            f"{choice.nodes_per_group:>11} {expected.groups:>6} {choice.spares:>6} {kept:>7} {away:>6} {faults:>6} "
            f"{gone:>8} {idle:>6}"
        )
    return "\n".join(lines)


def measured(run_dir: Path) -> Costs:
    """Costs from a run's events. Raises LaunchError when they cannot tell."""
    from everstep.report.score import measure

    try:
        found = measure(run_dir)
        by_groups: dict[int, list[float]] = {}
        for before, commit in pairwise(found.final):
            if commit.parent is before:
                by_groups.setdefault(len(commit.groups), []).append(commit.t - before.t)
        return calibrate(found.figures, found.rows, {count: median(times) for count, times in by_groups.items()})
    except (FileNotFoundError, ValueError) as error:
        raise LaunchError(f"{run_dir}: {error}") from None
