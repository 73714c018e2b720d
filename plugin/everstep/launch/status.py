"""Where a run on one machine is, for `everstep status`."""

import time
from pathlib import Path

from everstep.launch.view import RunState, duration
from everstep.report.checking import covered, judged
from everstep.report.protection import Protection
from everstep.run.beats import beats_of_groups
from everstep.run.directory import LaunchError, holder_of, stop_file
from everstep.run.events import read_events


def local_status(run_dir: Path) -> str:
    """A few lines: running or how it ended, step, groups, what happened last.

    Raises:
        LaunchError: the folder holds no run.
    """
    if not (run_dir / "events").is_dir():
        raise LaunchError(f"{run_dir} is no run directory: there are no events in it.")
    state, protection = RunState(0), Protection()
    for event in read_events(run_dir):
        state.apply(event)
        protection.take(event)
    holder = holder_of(run_dir)
    if holder is not None:
        going = f"running (pid {holder[0]}), {duration(state.elapsed_s(time.time()))} so far"
        if stop_file(run_dir).exists():
            going += "; asked to stop"
    else:
        going = state.ended or "not running on this machine, and nothing says how it ended"
    lines = [f"run     {going}", f"step    {state.progress()}"]
    lines.append(f"groups  {state.names()} in the last step; {state.kills} kills, {state.deaths} deaths so far")
    if state.left_out:
        lines.append(f"        {state.left_out}")
    lines += [f"failing {reason}" for _, reason in sorted(state.failing.items())]
    if snapshots := protection.line():
        lines.append(f"memory  {snapshots}")
    checks = state.checking.figures()
    if told := "; ".join(filter(None, (covered(checks), judged(checks)))):
        lines.append(f"checks  attention: {told}")
    for group, beat, age_s in beats_of_groups(run_dir) if holder is not None else ():
        lines.append(f"        group {group}: {beat.phase} of step {beat.step}, {age_s:.0f} s ago")
    if state.recent:
        lines += ["", *state.recent]
    return "\n".join(lines)
