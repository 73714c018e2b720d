"""`everstep plan`: how large should a group be, and what will failures cost?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import tyro

from everstep.report.forecast import Choice, Cluster, Costs, Forecast, calibrate, choices, varied
from everstep.run.directory import LaunchError
from everstep.run.events import read_events

HOUR_S, DAY_S = 3600.0, 86400.0
ROWS = 12
WIDTHS = (11, 6, 6, 7, 6, 6, 6, 8, 9, 6)


@dataclass(kw_only=True)
class Plan:
    """What share of its throughput a run keeps on a cluster that fails: by size of a group and number of spare groups,
    the best first, and for the best what snapshots, parity and timeouts change. docs/plan.md has the model.

    Flags that are not listed here are torchtitan's.
    """

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    nodes: int
    """Nodes of the whole run, spares included."""

    mtbf_hours: float | None = None
    """Mean time between failures of one node."""

    kill_every_s: float | None = None
    """Instead: what `everstep run --chaos-every` with so many seconds should keep, a rehearsal of the plan."""

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

    memory_lost_share: float = 0.02
    """Of the groups, those whose host memory is lost at such a moment."""

    snapshot_s: float = 0.0
    """By which a snapshot makes a step longer."""

    run_days: float = 30.0
    """How long the run lasts."""

    from_run: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Take step, notice and rejoin times from the events of this run, as far as it had faults."""


def plan(command: Plan, flags: Sequence[str]) -> int:
    """Returns the exit status."""
    from everstep.launch.settings import read_sections

    given = [value for value in (command.mtbf_hours, command.kill_every_s) if value is not None]
    if len(given) != 1:
        raise LaunchError("How often nodes fail: give either --mtbf-hours or --kill-every-s.")
    if command.nodes < 1 or command.ranks_per_node < 1 or given[0] <= 0:
        raise LaunchError(
            "--nodes and --ranks-per-node must be at least 1, --mtbf-hours or --kill-every-s more than 0."
        )
    sections = read_sections(command.config, flags)
    if command.from_run is not None:
        costs = measured(command.from_run)
    elif command.step_s is not None:
        costs = Costs(step_s=command.step_s)
    else:
        raise LaunchError("--step-s is missing: how long a healthy step takes, or --from RUN_DIR to take it from one.")
    if command.from_run is None:
        costs = Costs(
            step_s=costs.step_s,
            rejoin_s=command.rejoin_s,
            replace_s=command.replace_s,
            start_s=command.start_s,
            snapshot_s=command.snapshot_s,
        )
    cluster = Cluster(
        nodes=command.nodes,
        node_mtbf_s=command.mtbf_hours * HOUR_S if command.mtbf_hours is not None else math.inf,
        kill_every_s=command.kill_every_s or 0.0,
        hang_share=command.hang_share,
        all_gone_s=command.all_gone_days * DAY_S,
        memory_lost_share=command.memory_lost_share,
        run_s=command.run_days * DAY_S,
    )
    ft, snapshot = sections.fault_tolerance, sections.snapshot
    like = Choice(
        snapshot_interval=snapshot.interval if snapshot.enable else 0,
        parity=snapshot.parity,
        parity_group=snapshot.parity_group,
        checkpoint_steps=sections.checkpoint.interval,
        reduce_timeout_s=ft.reduce_timeout_s,
        stall_timeout_s=ft.stall_timeout_s,
    )
    training, split = sections.training, sections.parallelism
    sharing = max(1, split.tensor_parallel_degree * split.context_parallel_degree * split.pipeline_parallel_degree)

    def slots_of(size: int) -> int:
        """0: the file does not say, or the batch does not divide."""
        rows = training.local_batch_size * max(1, size * command.ranks_per_node // sharing)
        return training.global_batch_size // rows if rows > 0 and training.global_batch_size > 0 else 0

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
        f"{100 * expected.kept:.1f} % of the throughput of {command.nodes} nodes that never fail, "
        f"ETTR {expected.ettr:.3f}"
    )
    print("\nwith that, one setting changed at a time (ETTR):")
    for name, changed in varied(cluster, costs, best):
        print(f"  {name:<40} {changed.ettr:.4f}  {100 * (changed.ettr - expected.ettr):+.2f} points")
    return 0


def table(found: Sequence[tuple[Choice, Forecast]]) -> str:
    """Choices and what is lost to what, in percent."""
    heads = ("nodes/group", "groups", "spares", "kept", "ETTR", "away", "faults", "all gone", "snapshots", "idle")
    names = zip(heads, WIDTHS, strict=True)
    head = " ".join(f"{name:>{width}}" for name, width in names)
    lines = [head]
    for choice, expected in found:
        parts = (expected.away, expected.faults, expected.all_gone, expected.snapshots, expected.spares)
        whole = (str(choice.nodes_per_group), str(expected.groups), str(choice.spares))
        shares = (f"{100 * expected.kept:.1f} %", f"{expected.ettr:.3f}", *(f"{100 * part:.1f} %" for part in parts))
        lines.append(" ".join(f"{cell:>{width}}" for cell, width in zip((*whole, *shares), WIDTHS, strict=True)))
    return "\n".join(lines)


def measured(run_dir: Path) -> Costs:
    """Costs from a run's events. Raises LaunchError when they cannot tell."""
    from everstep.report.score import measure

    try:
        found = measure(run_dir)
        by_groups: dict[int, list[float]] = {}
        took: dict[float, float] = {}
        for before, commit in pairwise(found.final):
            if commit.parent is before:
                took[commit.t] = commit.t - before.t
                by_groups.setdefault(len(commit.groups), []).append(took[commit.t])
        back = [row["t"] + row["rejoin_s"] for row in found.rows if row["rejoin_s"] is not None]
        first_steps = [took[min(took, key=lambda end: abs(end - t))] for t in back] if took else []
        steps = {count: median(times) for count, times in by_groups.items()}
        held_up = [event.get("blocked_s") or 0.0 for event in read_events(run_dir, {"snapshot"})]
        return calibrate(found.figures, found.rows, steps, first_steps, mean(held_up) if held_up else 0.0)
    except (FileNotFoundError, ValueError) as error:
        raise LaunchError(f"{run_dir}: {error}") from None
