"""Checks where a rank runs and opens what it has in the run directory, before torchtitan builds anything."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.quorum.communicator import why_not
from everstep.quorum.interface import InterfaceError, use_interface
from everstep.run.beats import STARTUP
from everstep.run.directory import is_surplus, number_of_groups
from everstep.run.events import EventLog
from everstep.run.exits import USAGE_EXIT, TrainerEnds
from everstep.run.token import run_token
from everstep.snapshot.section import Snapshot
from everstep.titan.run_files import RankFiles
from everstep.titan.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a rank uses of its machine and of the run directory."""

    run_dir: Path
    host: str
    """Address that this rank's servers listen on and advertise."""
    token: bytes
    """The run's token."""
    events: EventLog
    files: RankFiles
    """This rank's other files in the run directory."""
    snapshots: Snapshots | None
    """Takes and restores snapshots of this rank's state; None without `[snapshot]`."""


def open_run_context(config: Any) -> RunContext:
    """Return this rank's `RunContext`. Changes those settings of an `EverstepTrainer.Config`, in place, that groups
    must not share. Has Gloo and NCCL use the interface of `bind_host`. Writes the first beat, so that a start that
    takes too long is noticed.

    Raises:
        TrainerEnds: this machine lacks the backend `process_group` or the address `bind_host`, or the run has no group
            of this id. A group that `everstep scale` has removed is let in.
        UnsafeError, OSError: other users can write to the run directory, or this rank cannot.
    """
    ft, rank, run_dir = config.fault_tolerance, int(os.environ["RANK"]), Path(config.dump_folder)
    if reason := why_not(ft.process_group):
        # Checked here too: the file may have been checked on another machine, or not at all.
        raise TrainerEnds(
            USAGE_EXIT, f'[fault_tolerance] process_group = "{ft.process_group}" {reason}: set it to "gloo"'
        )
    groups = number_of_groups(run_dir) or ft.groups
    if ft.group_id >= groups and not is_surplus(run_dir, ft.group_id):  # a surplus group is ended by its agent
        raise TrainerEnds(
            USAGE_EXIT,
            f"[fault_tolerance] group_id = {ft.group_id} is none of this run's groups, 0 to {groups - 1}",
        )
    try:
        host = use_interface(ft.bind_host).address
    except InterfaceError as error:
        raise TrainerEnds(USAGE_EXIT, str(error)) from error
    # One process draws the curves of all groups, from the run's events: report/curves.py.
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.comm.save_traces_folder += f"/group-{ft.group_id}"
    os.environ.setdefault("RUST_LOG", "warn")  # by default torchft logs every quorum
    token = run_token(run_dir)  # torchrun may have started this process with any umask
    events = EventLog(run_dir, ft.group_id, rank, "worker")
    files = RankFiles(
        run_dir,
        ft.group_id,
        rank,
        steps=config.semi_sync.commits(config.training.steps),
        stall_timeout_s=ft.stall_timeout_s,
    )
    files.beat(STARTUP, 0)
    snapshots = None
    if config.snapshot.enable:
        settings = Snapshot.of(config.snapshot)
        snapshots = Snapshots(run_dir, ft.group_id, host, settings, token, events)
    return RunContext(run_dir, host, token, events, files, snapshots)
