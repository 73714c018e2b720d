"""`everstep scale`: change the number of groups of a live run."""

from pathlib import Path

import tyro

from everstep.launch import slurm
from everstep.launch.prepare import Prepared, PrepareOptions, prepare_in_subprocess, read_answer
from everstep.run.directory import LaunchError, config_file, groups_file
from everstep.run.events import EventLog
from everstep.run.files import write_json
from everstep.run.token import require_run


def scale(run_dir: tyro.conf.Positional[Path], groups: int) -> int:
    """Change the number of groups of a live run. New groups heal from the others, and take part in steps once they hold
    the state. If groups have to go, those with the highest ids finish their step and leave. The losses stay the same.

    Args:
        run_dir: The run directory.
        groups: The new number of replica groups.
    """
    run_dir = run_dir.resolve()
    require_run(run_dir)
    if groups < 1:
        raise LaunchError("--groups must be at least 1; `everstep stop` ends a run.")
    before, submitted = read_answer(run_dir), slurm.job_file(run_dir).exists()
    over = slurm.has_ended(run_dir) or (submitted and not slurm.states_of(slurm.jobs_of(run_dir)["groups"]))
    if over or not isinstance(before, Prepared):
        raise LaunchError(f"nothing runs in {run_dir}: start it with --groups {groups}.")
    options = PrepareOptions(
        str(config_file(run_dir)), groups=groups, ranks=before.ranks, here=not submitted, together=not submitted
    )
    found = prepare_in_subprocess(options)
    if found.identity != before.identity:
        raise LaunchError("this run cannot be scaled: each group is a worker. Set [semi_sync] workers in a new run.")
    write_json(groups_file(run_dir), {"groups": groups})
    EventLog(run_dir, None, None, "scale").emit("scaled", count=groups)
    done = slurm.scale(run_dir, groups) if submitted else ""
    print("; ".join(filter(None, (f"{run_dir} is to have {groups} groups", done))))
    return 0
