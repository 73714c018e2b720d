"""The commands for a cluster: `everstep lighthouse` and `submit`; `scale` and `stop`, for runs on one machine too."""

import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tyro

from everstep.commands.doctor import as_text, has_errors, run_checks
from everstep.config.grammar import ROOT_KEYS, is_flag
from everstep.launch import lighthouse_job, slurm
from everstep.launch.prepare import Prepared, PrepareOptions, prepare_in_subprocess, read_or_prepare, require_prepared
from everstep.run.directory import (
    LaunchError,
    config_file,
    default_run_dir,
    groups_file,
    make_run_dir,
)
from everstep.run.events import EventLog
from everstep.run.files import write_json
from everstep.run.token import own_token, require_own, require_run

SET_HERE = {
    "--array": "--groups", "-a": "--groups", "--nodes": "--nodes-per-group", "-N": "--nodes-per-group",
    "--ntasks": "--ranks-per-node", "-n": "--ranks-per-node", "--ntasks-per-node": "--ranks-per-node",
}  # fmt: skip
"""sbatch's flags that would undo what `submit` asks for, and what to give in their place. The job of a group has one
task, an agent, on each node; of several, one trains and the others are refused by its fence."""


def lighthouse(
    config: tyro.conf.Positional[Path],
    *,
    run_dir: Path,
    host: str = "",
    page: bool = False,
    flags: Sequence[str] = (),
) -> int:
    """Run a run's lighthouse on this machine until the run is over, and restart it when it dies. Batch jobs start this
    command. Its address is published in the run directory.

    Args:
        config: The run's TOML file.
        run_dir: The run directory, shared by all groups.
        host: Address to listen on and to tell the groups. Default: the host name.
        page: Serve report.html on this machine's loopback while the run goes.
    """
    run_dir = run_dir.resolve()
    found = read_or_prepare(config, run_dir, flags, 0)
    return lighthouse_job.keep_up(run_dir, host or socket.gethostname(), found, page)


def submit(
    config: tyro.conf.Positional[Path],
    groups: int | None = None,
    nodes_per_group: int = 1,
    ranks_per_node: int = 1,
    run_dir: Path | None = None,
    lighthouse_flags: str = "",
    page: bool = False,
    dry_run: bool = False,
    flags: Sequence[str] = (),
) -> int:
    """Submit a run to Slurm: an array job with one task per replica group, and a small job for the lighthouse.

    Flags with a section, such as --training.steps 1000, are torchtitan's. All others go to sbatch for the groups' job,
    such as --partition gpu --gpus-per-node 8 --time 24:00:00. Exit status: 0 if both jobs are queued.

    Args:
        config: The run's TOML file.
        groups: Number of replica groups. Default: fault_tolerance.groups of the file.
        nodes_per_group: Number of nodes in each group.
        ranks_per_node: Number of ranks (processes, GPUs) on each node.
        run_dir: The run directory, on a file system that all nodes share. Default: runs/<config>-<timestamp>.
        lighthouse_flags: sbatch flags for the lighthouse's job, as one argument with an equals sign, for instance
            --lighthouse-flags="--partition=cpu".
        page: Serve report.html on the lighthouse node's loopback; the log of the lighthouse's job names the address.
        dry_run: Print the sbatch commands, and run nothing.
    """
    sbatch_flags, titan_flags = _split(flags)
    if (groups or 1) < 1 or nodes_per_group < 1 or ranks_per_node < 1:
        raise LaunchError("--groups, --nodes-per-group and --ranks-per-node must be at least 1.")
    if not dry_run:
        slurm.require_program("sbatch")
    try:
        words = shlex.split(lighthouse_flags)
    except ValueError as error:
        raise LaunchError(f"--lighthouse-flags: {error}.") from None
    ranks = ranks_per_node * nodes_per_group
    options = PrepareOptions(config=str(config), flags=titan_flags, groups=groups, ranks=ranks, here=False)
    run_dir = (run_dir or default_run_dir(config)).resolve()
    found = prepare_in_subprocess(options) if dry_run else _prepare_run_dir(options, run_dir, nodes_per_group)
    submission = slurm.Submission(
        config=config.resolve(),
        run_dir=run_dir,
        groups=found.groups,
        nodes_per_group=nodes_per_group,
        sbatch_flags=sbatch_flags,
        lighthouse_flags=words,
        page=page,
        ranks_per_node=ranks_per_node,
    )
    if dry_run:
        print(*map(shlex.join, submission.commands().values()), sep="\n")
    else:
        print(_what_next(submission, slurm.submit(submission)))
    return 0


def _split(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split flags into sbatch's and torchtitan's: those with a section (`--training.steps 10`), and ROOT_KEYS."""
    slurm: list[str] = []
    titan: list[str] = []
    target = slurm
    for flag in flags:
        if is_flag(flag):
            name = flag.lstrip("-").partition("=")[0].replace("-", "_")
            target = titan if re.match(r"[a-z_]+\.", name) or name in ROOT_KEYS else slurm
            asked = flag.partition("=")[0] if flag.startswith("--") else flag[:2]
            if asked in SET_HERE:
                raise LaunchError(f"{flag}: give {SET_HERE[asked]} instead, by which submit sets sbatch's {asked}.")
        target.append(flag)
    return slurm, titan


def _what_next(submission: slurm.Submission, jobs: Mapping[str, str]) -> str:
    """Return what the person who submitted can do next."""
    run_dir = shlex.quote(str(submission.run_dir))
    return "\n".join(
        [
            f"groups      job {jobs['groups']}, array 0-{submission.groups - 1}, "
            f"{submission.nodes_per_group} node(s) each, logs in {run_dir}/logs/group-K/",
            f"lighthouse  job {jobs['lighthouse']}",
            f"watch       everstep status {run_dir}    (or tail -f {run_dir}/logs/group-0/job.log)",
            f"stop        everstep stop {run_dir}    (cleanly, with a final checkpoint)",
            f"resume      the same submit command again, with --run-dir {run_dir}",
        ]
    )


def _prepare_run_dir(options: PrepareOptions, run_dir: Path, nodes_per_group: int) -> Prepared:
    """Make the run directory with the config in it. Raises LaunchError."""
    make_run_dir(run_dir)
    require_own(run_dir)
    alive = slurm.alive_jobs(run_dir)  # raises if the run is submitted already
    found = prepare_in_subprocess(replace(options, run_dir=str(run_dir), begins="groups" not in alive))
    _print_findings(found, nodes_per_group, run_dir)
    own_token(run_dir)
    print(*found.warnings, sep="\n", end="\n" if found.warnings else "", file=sys.stderr)
    return found


def _print_findings(found: Prepared, nodes_per_group: int, run_dir: Path) -> None:
    """Print what `everstep doctor` finds on a login node. Raises LaunchError if the run cannot work."""
    lines = [line for line in run_checks(found, nodes_per_group, run_dir, host="") if line.verdict != "ok"]
    if has_errors(lines):
        raise LaunchError("the run was not submitted:\n" + as_text(lines))
    if lines:
        print(as_text(lines), file=sys.stderr)


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
    submitted = slurm.job_file(run_dir).exists()
    if slurm.has_ended(run_dir) or (submitted and not slurm.states_of(slurm.jobs_of(run_dir)["groups"])):
        raise LaunchError(f"nothing runs in {run_dir}: start it with --groups {groups}.")
    before = require_prepared(run_dir)
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


def stop(run_dir: tyro.conf.Positional[Path]) -> int:
    """Stop a run cleanly: every group finishes its step, and one writes the final checkpoint. Does not wait for this.

    Args:
        run_dir: The run directory.
    """
    require_run(run_dir)
    print(slurm.stop(run_dir.resolve()))
    return 0
