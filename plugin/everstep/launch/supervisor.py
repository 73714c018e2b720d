"""`everstep run`: the launcher's loop with all groups of a run and its lighthouse, on one machine.

The state of the run is in the run directory, so that a launcher that was killed can simply be started again.
"""

import contextlib
import functools
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import everstep
from everstep.launch import prepare
from everstep.launch.forking import PRELOAD, preload
from everstep.launch.incarnation import last_commits
from everstep.launch.launcher import TICK_S, Launcher
from everstep.launch.lighthouse import Lighthouse
from everstep.launch.machine import HOST, devices_of_group
from everstep.launch.prepare import Prepared, PrepareOptions, read_prepared
from everstep.launch.settings import GroupSettings
from everstep.launch.slurm import job_file
from everstep.launch.view import OnEvents
from everstep.run.beats import forget_beats
from everstep.run.directory import (
    LaunchError,
    ask_to_stop,
    ended_file,
    finished_step,
    groups_file,
    lock_run_dir,
    number_of_groups,
    refused_file,
    stop_file,
)
from everstep.run.events import EventLog, EventTail
from everstep.run.files import read_json
from everstep.run.token import own_token

STOPPED_AT_ONCE_EXIT = 130
"""The status that a shell reports for a command ended by Ctrl-C."""
Chaos = Callable[[Path, int], None]


class Refused(LaunchError):
    """The config cannot work, or a stop was requested before the check ended. Nothing was started, so a new run
    directory need not be kept."""


class Supervisor:
    """Runs one run to its end.

    Args:
        options: what to run, except its run directory.
        page: whether to serve the page of the live run, on loopback.
        chaos: what a process beside the run does to disturb it, from the run directory and the seed; None: nothing.
    """

    def __init__(
        self,
        options: PrepareOptions,
        run_dir: Path,
        on_events: OnEvents,
        page: bool = False,
        chaos: Chaos | None = None,
    ) -> None:
        self._options, self._run_dir, self._on_events = options, run_dir, on_events
        self._page, self._chaos = page, chaos
        self._launcher = Launcher(run_dir, "supervisor", on_events)
        self._tail = EventTail(run_dir)
        self._stop_told, self._begun_t = False, 0.0

    def run(self) -> int:
        """Run until all groups have ended, or end at once at a second request to stop. Return the exit status: 0 if the
        run is done or was stopped cleanly, 130 if it was ended at once, 1 if it failed.

        Raises LaunchError if the config or the run directory cannot be used.
        """
        run_dir, launcher, cannot_go_on = self._run_dir, self._launcher, ""
        with launcher:
            self._tail.skip_to_end()
            forget_beats(run_dir)
            for file in (stop_file, ended_file, groups_file, refused_file):
                file(run_dir).unlink(missing_ok=True)
            preload(PRELOAD, launcher.is_stopping)
            found = self._prepare()
            try:
                self._begin(found)
                lighthouse = launcher.serve(HOST, found, self._page)
                launcher.jobs["groups"] = functools.partial(self._keep_groups, found, lighthouse)
                launcher.jobs["events"] = self._report_events
                launcher.run(self._is_over)
            except (LaunchError, OSError) as error:
                cannot_go_on = str(error)
            self._report_events()
            status, reason = self._end(cannot_go_on)
            self._on_events([launcher.events.emit("run_ended", status=status, reason=reason)])
            if self._cut_short:
                return STOPPED_AT_ONCE_EXIT
            return 1 if status == "failed" else 0

    @property
    def _cut_short(self) -> bool:
        return len(self._launcher.stops) > 1 and not all(group.end for group in self._launcher.groups)

    def _is_over(self) -> bool:
        groups = self._launcher.groups
        if not groups:
            return self._launcher.is_stopping()
        return self._cut_short or all(group.end for group in groups)

    def _end(self, cannot_go_on: str) -> tuple[str, str]:
        """Return the status with which the run ended, and the reason. It does not depend on groups that were told to
        leave: the others go on without them."""
        ends = [group.end for group in self._launcher.groups if group.end is not None and not group.leaves]
        kinds = {end.status for end in ends}
        if self._cut_short:
            return "stopped", "stopped at once, without a final checkpoint"
        if cannot_go_on:
            return "failed", cannot_go_on
        # The newest by its time: the run may have gone back to an older step since a group made its last one. Groups
        # that were asked to stop between two starts have saved nothing.
        made = [one for one in last_commits(self._run_dir) if one["t"] >= self._begun_t]
        newest = max(made, key=lambda commit: commit["t"], default={"step": 0})["step"]
        stopping = self._launcher.is_stopping()
        if (stopping or "killed" in kinds) and max(0, finished_step(self._run_dir)) < newest:
            reasons = [end.reason for end in ends if end.status == "killed"]
            reason = "; ".join(reasons[:1] or ["no group was training that could save it"])
            return "failed", f"stopped, but the state after the last step is not saved; {reason}"
        if stopping:
            return "stopped", "stopped cleanly"
        if "done" in kinds:
            return "done", "every group finished" if len(kinds) == 1 else "finished, though not by every group"
        if "stopped" in kinds:
            return "stopped", "its workers were asked to stop"
        return "failed", f"every group was given up; {ends[-1].reason}"

    # Before the groups

    def _prepare(self) -> Prepared:
        """Check the config in a forked process that writes the result to the run directory. Raises LaunchError."""
        options = replace(self._options, run_dir=str(self._run_dir), begins=True)
        log = self._run_dir / "logs" / "prepare.log"
        try:
            child = self._launcher.children.start(functools.partial(prepare.main, asdict(options)), log)
        except OSError as error:
            raise Refused(f"the process that checks the config could not be started: {error.strerror}.") from None
        while child.alive and not self._launcher.is_stopping():
            self._launcher.children.wait(TICK_S)
        if self._launcher.is_stopping():
            raise Refused("stopped before anything was started.")
        if child.exitcode == 0 and (found := read_prepared(self._run_dir)):
            return found
        if refused := read_json(refused_file(self._run_dir)).get("error"):
            raise Refused(str(refused))
        raise LaunchError(f"checking the config failed (exit status {child.exitcode}), see {log}.")

    def _begin(self, found: Prepared) -> None:
        """Report the start of the run and the config's warnings, and start the process of `chaos`, if wanted."""
        launcher, state = self._launcher, self._run_dir / "state"
        earlier = job_file(self._run_dir), *state.glob("group-*.over"), *state.glob("group-*.fence.json")
        for path in earlier:  # of a run under Slurm, whose agents are all gone: see `lock_run_dir`
            path.unlink(missing_ok=True)
        begun = launcher.events.emit(
            "run_started",
            groups=found.groups,
            ranks_per_group=self._options.ranks,
            seed=found.seed,
            version=everstep.__version__,
            steps=found.steps,
            identity=found.identity,
        )
        self._begun_t = begun["t"]
        for warning in found.warnings:
            launcher.events.emit("warning", text=warning)
        if self._chaos:
            disturb = functools.partial(self._chaos, self._run_dir, found.seed)
            launcher.children.start(disturb, self._run_dir / "logs" / "chaos.log")

    def _keep_groups(self, found: Prepared, lighthouse: Lighthouse) -> None:
        """Add groups up to the wanted number (`everstep scale`), once the lighthouse has a published address. A group
        that was told to leave ends first, and is then added anew if it is wanted again."""
        groups = self._launcher.groups
        if not lighthouse.published or self._launcher.is_stopping():
            return
        wanted = number_of_groups(self._run_dir)
        gone = [group for group in groups if group.leaves and group.end]
        groups[:] = [group for group in groups if group not in gone]
        for group in gone:
            group.close()
        for index in sorted(set(range(wanted)) - {group.settings.group for group in groups}):
            events = EventLog(self._run_dir, index, None, "agent")
            self._launcher.add_group(self.group_settings(index, wanted, found), events)

    def group_settings(self, index: int, groups: int, found: Prepared) -> GroupSettings:
        """Return the settings of the group `index` out of `groups`."""
        ranks = self._options.ranks
        return GroupSettings(
            run_dir=self._run_dir,
            group=index,
            ranks=ranks,
            ranks_here=groups * ranks,
            host=HOST,
            devices=devices_of_group(found.devices, index, ranks),
            fault_tolerance=found.fault_tolerance,
        )

    def _report_events(self) -> None:
        if self._launcher.is_stopping() and not self._stop_told:
            self._stop_told = True
            self._launcher.events.emit("stopping")
            with contextlib.suppress(OSError):  # a full disk
                ask_to_stop(self._run_dir)  # the file stays, for a worker that misses the signal
        self._on_events(self._tail.new())


def run(
    options: PrepareOptions,
    on_events: OnEvents = lambda events: None,
    *,
    page: bool = False,
    chaos: Chaos | None = None,
) -> int:
    """Run to the end and return the exit status. Raises LaunchError for errors that the user can fix. The arguments are
    those of `Supervisor`."""
    run_dir = Path(options.run_dir).resolve()
    is_new = not run_dir.exists()
    lock_run_dir(run_dir)
    own_token(run_dir)
    try:
        return Supervisor(options, run_dir, on_events, page, chaos).run()
    except Refused:
        if is_new:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
