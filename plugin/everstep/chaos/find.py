"""Which target a run directory is."""

from collections.abc import Iterable
from pathlib import Path

from everstep.chaos.cluster import SlurmTarget
from everstep.chaos.target import LocalTarget, Target
from everstep.chaos.view import View
from everstep.launch.slurm import job_file
from everstep.run.directory import LaunchError
from everstep.run.files import read_json
from everstep.run.token import require_own


def find_target(run_dir: Path, spared: Iterable[int] = ()) -> Target:
    """The run in `run_dir`, wherever it runs. Raises LaunchError: no run is there, it is over, or it was submitted to a
    Slurm that cannot be reached from here."""
    run_dir = Path(run_dir).resolve()
    if not (run_dir / "events").is_dir():
        raise LaunchError(f"{run_dir} is no run directory: there are no events in it.")
    if not (run_dir / "config.toml").is_file():
        raise LaunchError(f"the run in {run_dir} has not begun yet: wait for its first step.")
    try:
        require_own(run_dir)
    except ValueError as error:
        raise LaunchError(f"{error}.") from None
    submitted = "groups" in read_json(job_file(run_dir))
    view = View(run_dir, spared, one_host=not submitted)
    target: Target = SlurmTarget(view) if submitted else LocalTarget(view)
    view.catch_up()
    if not target.alive() or (submitted and target.over()):
        ended = view.ended
        why = f"{ended['status']}, {ended['reason']}" if ended else "none of its jobs or its supervisor is left"
        raise LaunchError(f"the run in {run_dir} is over: {why}.")
    return target
