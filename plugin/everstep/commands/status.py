"""`everstep status` and `watch`: where a run is, from its events, and what Slurm says of its groups."""

import time
from pathlib import Path

import tyro

from everstep.launch.slurm import has_ended, job_file, jobs_of, states_of
from everstep.launch.view import RunState
from everstep.report.score import checks, lines_of
from everstep.report.troubles import shortage
from everstep.run.address import published_address
from everstep.run.beats import beats_of_groups
from everstep.run.directory import End, check_room, holder_of, over_file, require_events, stop_file
from everstep.run.event_fields import OF_EVERY_STEP
from everstep.run.events import EventTail, read_events
from everstep.run.fence import groups_held
from everstep.run.files import read_typed

UNKNOWN_END = "not running; no event says how it ended"
POLL_S = 0.25
"""Seconds between two looks of `everstep watch`."""


def watch(run_dir: tyro.conf.Positional[Path]) -> int:
    """Watch a run, on this machine or on a cluster: what happened last, then a line for each step and each other event.
    Ends when the run ends. Ctrl-C ends only the view. Exit status: 1 if the run failed or was killed, else 0.

    Args:
        run_dir: The run directory.
    """
    require_events(run_dir)
    tail, view = EventTail(run_dir), RunState()
    for event in tail.past(lately=OF_EVERY_STEP):
        view.apply(event)
    print(*view.recent, view.progress(), sep="\n", flush=True)
    while True:
        gone = has_ended(run_dir)  # before its last events are read
        view.show(tail.new())
        if view.status != "running" and (gone or not job_file(run_dir).exists()):  # else Slurm requeues groups
            return int(view.status == "failed")
        if gone:
            print(f"run     {UNKNOWN_END}")
            return 1
        time.sleep(POLL_S)


def status(run_dir: tyro.conf.Positional[Path]) -> int:
    """Show where a run is: its step, its groups and what happened last; for a run on Slurm also the state of its jobs.

    Args:
        run_dir: The run directory.
    """
    print(status_of(run_dir.resolve()))
    return 0


def status_of(run_dir: Path) -> str:
    """Return the text of `everstep status`: running or how it ended, step, groups, troubles, what happened last.

    Raises:
        LaunchError: the folder holds no run.
    """
    require_events(run_dir)
    state = RunState()
    for event in read_events(run_dir, lately=OF_EVERY_STEP):
        state.apply(event)
    if state.status == "running":
        try:
            check_room(run_dir)
        except OSError as error:  # no event reports a full disk, as none can be written
            state.apply(shortage(run_dir, str(error.strerror)))
    head, table = (_on_slurm if job_file(run_dir).exists() else _here)(run_dir, state)
    lines = [*head, f"step    {state.progress()}"]
    fates = f"{state.faults.kills} kills, {state.faults.deaths} deaths so far"
    lines.append(f"groups  {state.group_ids()} in the last step; {fates}")
    lines += [f"WRONG   {sentence}" for sentence in state.troubles.sentences]
    if snapshots := state.protection.line():
        lines.append(f"memory  {snapshots}")
    lines += [f"{word:<7} {text}" for word, text in lines_of(checks(state))]
    return "\n".join([*lines, *table, *([""] if state.recent else []), *state.recent])


def _here(run_dir: Path, state: RunState) -> tuple[list[str], list[str]]:
    """Return the first lines, and the lines on each group, for a run without Slurm."""
    holder, held = holder_of(run_dir), groups_held(run_dir)
    if holder is None and not held:
        how = ", ".join(filter(None, (state.status, (state.current.ending or {}).get("reason"))))
        unknown = state.status == "running"
        return [f"run     {UNKNOWN_END if unknown else how}"], []
    by = f"pid {holder}" if holder else "on another machine" if holder == 0 else f"processes of {', '.join(held)}"
    going = f"run     running ({by})" + "; asked to stop" * stop_file(run_dir).exists()
    beats = beats_of_groups(run_dir)
    return [going], [
        f"        group {group}: {beat.phase} of step {beat.step}, {age:.0f} s ago" for group, beat, age in beats
    ]


def _on_slurm(run_dir: Path, state: RunState) -> tuple[list[str], list[str]]:
    """Return the same for a run on Slurm. Raises LaunchError if its groups were not submitted."""
    jobs = jobs_of(run_dir)
    tasks = {task.group: task for task in states_of(jobs["groups"])}
    lighthouse = states_of(jobs["lighthouse"]) if "lighthouse" in jobs else []
    where = published_address(run_dir) or "no address yet"
    head = [f"lighthouse  {lighthouse[0].state if lighthouse else 'ended':12} {where}"]
    table = ["", f"{'group':>5}  {'Slurm':12} {'nodes':16} {'starts':>6}  {'last beat':24} notes"]
    beats = {group: f"{beat.phase}, step {beat.step}, {age:.0f} s" for group, beat, age in beats_of_groups(run_dir)}
    for group in sorted({*state.starts, *(g for g in tasks if g is not None), *beats}):
        task, over = tasks.get(group), read_typed(End, over_file(run_dir, group))
        notes = [f"{over.status}: {over.reason}"] if over else []
        notes += [task.reason] if task and task.state == "PENDING" else []
        notes += state.left_nodes.get(group, [])
        row = f"{group:>5}  {task.state if task else 'ended':12} {(task.nodes if task else '') or '-':16} "
        table.append(f"{row}{state.starts[group]:>6}  {beats.get(group, '-'):24} {'; '.join(notes)}")
    return head, table
