"""`everstep chaos`: inject faults into a live run, and show what happens."""

import math
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from everstep.chaos.campaign import Campaign, read_campaign
from everstep.chaos.cluster import find_target
from everstep.chaos.fault import Fault
from everstep.chaos.kinds import FAULTS, require_kinds, why_never
from everstep.chaos.runner import Runner, drive
from everstep.chaos.schedule import Schedule
from everstep.launch.prepare import read_prepared
from everstep.launch.view import describe
from everstep.run.directory import LaunchError
from everstep.run.stops import collect_stops

DEFAULT_FAULTS = ["kill-group"]
SHOWN = {
    "fault", "fault_failed", "fault_undone", "fault_undo_failed", "workers_died", "workers_stalled", "run_started",
}  # fmt: skip
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def chaos(
    run_dir: tyro.conf.Positional[Path | None] = None,
    every: float | None = None,
    for_: Annotated[str | None, tyro.conf.arg(name="for")] = None,
    seed: int | None = None,
    faults: str | None = None,
    campaign: Path | None = None,
    list: bool = False,
) -> int:
    """Inject faults into a live run, on this machine or on Slurm: at regular intervals, or as a campaign file says.

    Ends on Ctrl-C, with the run, after --for, or when the campaign is finished; faults that still last are then ended.
    Only processes of this run are hit. The last of several groups that hold the state is hit by kill-all only. Exit
    status: 1 if faults of the campaign were not done, else 0.

    Args:
        run_dir: The directory of a live run.
        every: Seconds between two faults. The first comes that long after the first step.
        for_: How long to inject, counted from the first step: 90s, 10m, 2h. Default: until the run ends.
        seed: Seed of the draws of kinds, groups and ranks. Default: the campaign's, or 0.
        faults: Kinds for --every, with commas: kill-worker,stop-worker. "all": every kind that this run allows.
            Default: kill-group.
        campaign: A TOML file that says which fault comes at which step or time.
        list: List the kinds of faults and what each breaks, and end.
    """
    if list:
        print(listing())
        return 0
    if faults and every is None:
        raise LaunchError("--faults needs --every SECONDS, as a campaign file names its own faults.")
    planned = read_campaign(campaign) if campaign else Campaign([])
    schedule, asked = _plan(planned, every, seed, faults.split(",") if faults else DEFAULT_FAULTS)
    for_s = parse_duration(for_) if for_ else None
    if run_dir is None:
        raise LaunchError("give the directory of a live run; `everstep chaos --list` lists the kinds of faults.")
    prepared = read_prepared(run_dir)
    for fault in planned.faults:
        if prepared and (fault.at_step or 0) > prepared.steps:
            raise LaunchError(f"{campaign}: {fault.name} at {fault.when}, but the run ends at step {prepared.steps}.")
    target = find_target(run_dir)
    for fault in asked:
        if reason := why_never(fault, target):
            raise LaunchError(f"{reason}.")
    runner, stops, begin = Runner(target, schedule), collect_stops(), time.monotonic()

    def say(event: dict) -> None:
        if event["kind"] in SHOWN and (line := describe(event)):
            print(f"{time.monotonic() - begin:8.1f} s  step {target.run.step:5}  {line}", flush=True)

    why = drive(runner, say, for_s, lambda: bool(stops))
    unmet = schedule.unmet() if why != "stopped" else []
    print(f"{runner.injected} faults in {time.monotonic() - begin:.0f} s.", flush=True)
    print(*unmet, sep="\n", end="\n" if unmet else "", file=sys.stderr)
    return int(bool(unmet))


def _plan(
    campaign: Campaign, every_s: float | None, seed: int | None, names: list[str]
) -> tuple[Schedule, list[Fault]]:
    """Return the schedule, and the faults that the run has to allow: the campaign's, and those given by name. Of "all",
    those that it does not allow are left out later. Raises LaunchError for arguments that make no sense."""
    if every_s is None and not campaign.faults:
        raise LaunchError("give --every SECONDS, or a --campaign FILE.toml.")
    if every_s is not None and not 0 < every_s < math.inf:
        raise LaunchError("--every must be more than 0 seconds.")
    if names != ["all"]:
        require_kinds(names)
    faults = [Fault(name=name) for name in (FAULTS if names == ["all"] else names)]
    seed = campaign.seed if seed is None else seed
    asked = campaign.faults if names == ["all"] else [*faults, *campaign.faults]
    return Schedule(campaign.faults, seed, every_s, faults), asked


def parse_duration(text: str) -> float:
    """Parse a duration such as 90, 90s, 10m, 2h or 1d into seconds. Raises LaunchError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise LaunchError(f"--for {text}: give a time like 90s, 10m or 2h.")
    return float(found[1]) * UNITS_S[found[2]]


def listing() -> str:
    """Format the list of all kinds of faults."""
    lines = [f"{name:<18}{', '.join(sorted(kind.on)):<14}{kind.breaks}" for name, kind in FAULTS.items()]
    return "\n".join([*lines, "", "docs/faults.md says what each costs a run."])
