"""A trial of a config: start a run, break it, stop it, report, and compare it with a run in which nothing failed.

`scripts/chaos_run.sh CONFIG.toml --every 15 --for 5m --verify`; its exit status says whether the promise was kept.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from everstep.chaos.cluster import find_target
from everstep.chaos.command import Plan, inject, runner_of, settle
from everstep.chaos.target import Target
from everstep.config.source import read_source
from everstep.report.page import write_report
from everstep.report.score import score, summary, verdict
from everstep.run.directory import LaunchError, default_run_dir, holder_of, make_run_dir
from everstep.run.stops import collect_stops

POLL_S = 0.2


@dataclass(kw_only=True)
class Trial(Plan):
    """Start a run, break it, stop it, report. Ends with status 0 if the run kept its promise and every fault of the
    campaign was done.

    With --for the run is stopped cleanly after that time, if it is not over by then; without, it goes on to its last
    step. Flags that are not listed here go to `everstep run`: --groups, --steps, torchtitan's.
    """

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    verify: bool = False
    """Run it again for as many steps without faults, and compare the losses."""

    run_dir: Path | None = None
    """Where everything of the run is kept. Default: runs/<config>-<timestamp>."""


def trial(command: Trial, flags: Sequence[str]) -> int:
    """Exit status 0: the promise was kept; 1: it was not, or faults of the campaign were not done."""
    schedule, named, for_s = settle(command)
    read_source(command.config)  # says at once that there is none
    run_dir = (command.run_dir or default_run_dir(command.config, time.localtime())).resolve()
    if run_dir.exists():
        raise LaunchError(f"{run_dir} is there already: a trial needs a run of its own.")
    stops = collect_stops()
    started = _start(command, run_dir, flags)
    try:
        target = _await_run(started, run_dir)
        why, unmet = inject(runner_of(target, schedule, named), for_s, lambda: bool(stops))
        asked = why in ("time", "stopped")
        while started.poll() is None:
            if asked or stops:
                started.send_signal(signal.SIGINT)
                started.wait()
            time.sleep(POLL_S)
        reference = _run_again(command, run_dir, flags) if command.verify and not stops else None
    finally:
        started.terminate()  # whatever went wrong here, the run does not stay
        started.wait()
    figures = write_report(run_dir, reference)
    print(summary(figures, may_stop=True))
    if reference and (missing := figures["steps"] - figures["loss_delta_steps"]):
        unmet = [*unmet, f"The run without faults has no loss of {missing} steps; nothing is known of those."]
        print(unmet[-1])
    print(f"page      {run_dir / 'report.html'}")
    print(f"Everything of this run is in {run_dir}" + (f", the run without faults in {reference}" if reference else ""))
    return int(bool(verdict(figures, may_stop=True) or unmet))


def _start(command: Trial, run_dir: Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "everstep.cli", "run", str(command.config), "--run-dir", str(run_dir)]
    make_run_dir(run_dir)
    (run_dir / "logs").mkdir(exist_ok=True)
    with (run_dir / "logs" / "launcher.log").open("ab") as output:
        # In a session of its own: Ctrl-C is ours, and the run is then asked to stop in good order.
        return subprocess.Popen(
            [*words, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )


def _await_run(started: subprocess.Popen[bytes], run_dir: Path) -> Target:
    while not (run_dir / "config.toml").exists() or holder_of(run_dir) is None:
        if started.poll() is not None:
            raise LaunchError((run_dir / "logs" / "launcher.log").read_text().strip() or "the run did not start.")
        time.sleep(POLL_S)
    return find_target(run_dir)


def _run_again(command: Trial, run_dir: Path, flags: Sequence[str]) -> Path:
    """The same run without faults, as far as that one came."""
    figures, config = score(run_dir), read_source(run_dir / "config.toml").table
    steps = (figures["last_step"] or 1) * (figures["inner_steps"] or 1)  # of a semi-synchronous run it counts rounds
    total = config.get("lr_scheduler", {}).get("total_steps")
    total = total if isinstance(total, int) else config["training"]["steps"]
    reference = run_dir.with_name(run_dir.name + "-reference")
    # The learning rate must not depend on how far it goes, and a checkpoint of the first run must not be its start.
    own = ["--lr_scheduler.total_steps", str(total), "--checkpoint.folder", "checkpoint"]
    print(f"The same {steps} steps without faults …", flush=True)
    status = _start(command, reference, [*flags, "--steps", str(steps), *own]).wait()
    if status:
        raise LaunchError(f"the run without faults ended with status {status}, see {reference}/logs/launcher.log.")
    return reference


def main(argv: Sequence[str] | None = None) -> int:
    """`scripts/chaos_run.sh`."""
    command, flags = tyro.cli(Trial, prog="scripts/chaos_run.sh", args=argv, return_unknown_args=True)
    try:
        return trial(command, flags)
    except LaunchError as error:
        print(f"chaos_run.sh: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
