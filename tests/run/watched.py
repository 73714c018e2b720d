"""`everstep run` as a user starts it. Tests watch it through its events and processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from everstep.report import score
from everstep.run.beats import beat_path, read_beat
from everstep.run.events import EventTail
from forked import Forked, ran

HERE = Path(__file__).parent
DEADLINE_S = 300.0
"""Seconds to wait for anything. Far more than an idle machine needs, so that a busy one does not fail a test."""

LOSS_TOLERANCE = 1e-4

BASE = {
    "job": {"module": "small_job", "config": "debugmodel"},
    "training": {
        "steps": 30, "seq_len": 64, "local_batch_size": 1, "disable_cuda_graphs": True,
        "global_batch_size": 7,  # uneven among two and three groups
        # In bfloat16 another order of sums rounds differently, which shows with so few tokens in a batch.
        "mixed_precision_param": "float32",
    },
    "optimizer": {"lr": 8e-4, "implementation": "fused"},
    # With a fixed number here, the curve does not depend on the number of steps of a run.
    "lr_scheduler": {"warmup_steps": 5, "total_steps": 1_000_000},
    "activation_checkpoint": {"mode": "none"},
    "data": {"source": "stdlib"},
    "fault_tolerance": {
        "enable": True, "groups": 3, "heartbeat_timeout_s": 2.0, "connect_timeout_s": 3.0, "reduce_timeout_s": 8.0,
        "join_timeout_s": 4.0, "quorum_timeout_s": 12.0, "stall_timeout_s": 15.0, "startup_timeout_s": 300.0,
        "audit_interval": 10,
    },
    "checkpoint": {"enable": True, "interval": 10, "keep_latest_k": 2},
    "metrics": {"log_freq": 10},
    "debug": {"seed": 0},
}  # fmt: skip
PATIENT = {"stall_timeout_s": 300.0, "startup_timeout_s": 900.0, "reduce_timeout_s": 60.0, "quorum_timeout_s": 90.0}
"""Long timeouts for a run in which a busy machine must not look like a fault."""


def write_config(path, **sections):
    """Write BASE, updated by `sections`, as TOML to `path`. Keys with the value None are left out."""
    table = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in BASE.keys() | sections.keys()}
    path.write_text(toml(table))
    return path


def toml(table):
    """Return sections as TOML. The section "" has the keys before the first one."""
    lines = []
    for name, keys in sorted(table.items()):
        if name:
            lines.append(f"[{name}]")
        for key, value in keys.items():
            if value is not None:
                text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
                lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"


def until(condition, what, deadline_s=DEADLINE_S):
    """Poll until `condition()` is true, and return its value. After the deadline fail the test, naming `what`."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.02)
    pytest.fail(f"waited {deadline_s:g} s for {what}")
    return None


def of_kind(events, kind, after=0.0, **fields):
    """Return the events of this kind with these fields, later than `after` (wall time)."""
    found = [event for event in events if event["kind"] == kind and event["t"] > after]
    return [event for event in found if all(event.get(name) == value for name, value in fields.items())]


def environment(**more):
    paths = os.pathsep.join([str(HERE), *sys.path])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def everstep(*words, timeout=300.0, **options):
    """Run a command of Everstep, and return what `subprocess.run` returns."""
    command = [sys.executable, "-m", "everstep.cli", *map(str, words)]
    return ran(command, timeout=timeout, **{"env": environment()} | options)


class Followed:
    """A run that tests watch through its events.

    process: the run's process, whose end ends a wait; None if there are several.
    """

    process = None

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.tail, self.seen = EventTail(run_dir), []

    def events(self, kind, after=0.0, **fields):
        """Return the events of this start of the run, in order, later than `after` (wall time)."""
        self.seen += self.tail.new()
        return of_kind(self.seen, kind, after, **fields)

    def until(self, condition, what):
        """Like the function `until`, but fail as well when the run ends first."""

        def found():
            over = self.process is not None and self.process.poll() is not None
            result = condition()
            if over and not result:
                pytest.fail(f"the run ended ({self.process.poll()}) before {what}: {self.console()}")
            return result

        return until(found, what)

    def wait_for(self, kind, after=0.0, **fields):
        """Wait for the first such event and return it. Fail if the run ends without it."""
        return self.until(lambda: self.events(kind, after, **fields), f"{kind} {fields}")[0]

    def wait_for_step(self, groups, after=None):
        """Wait for a step that all `groups` make and commit, later than `after` (None: now). Return its event."""
        after, wanted = time.time() if after is None else after, set(groups)

        def common():
            seen = {}
            for event in self.events("commit", after, rank=0):
                if event["group"] in wanted and wanted <= set(event["groups"]):
                    seen.setdefault(event["step"], {})[event["group"]] = event
            return [event for commits in seen.values() if commits.keys() == wanted for event in commits.values()]

        return self.until(common, f"a step of {groups}")[0]

    def workers(self, group):
        """Return the pids of the group's newest workers, rank 0 first."""
        self.wait_for("workers_started", group=group)
        return self.events("workers_started", group=group)[-1]["pids"]

    def console(self):
        return self.output.read_text() if self.output.exists() else ""

    def tree(self):
        """Return all processes of the run, the launcher first."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


class Watched(Followed):
    starts = Forked

    def __init__(self, config, run_dir, *args, pace_s=0.0):
        """`pace_s`: seconds that each slot of `small_job` sleeps."""
        super().__init__(run_dir)
        self.output = run_dir.with_suffix(".out")
        temporary = run_dir.parent / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        self.tail.skip_to_end()
        env = {"TMPDIR": str(temporary), "HF_HOME": str(temporary / "hf"), "HF_HUB_OFFLINE": "1"}
        with self.output.open("ab") as output:
            self.process = self.starts(
                [sys.executable, "-m", "everstep.cli", "run", str(config), "--run-dir", str(run_dir), *args],
                env=environment(EVERSTEP_TEST_PACE_S=str(pace_s), **env), cwd=run_dir.parent,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_for_phase(self, group, phases, rank=0):
        """Wait until a rank of the group's newest incarnation is in one of these phases, and return its beat."""

        def found():
            beat = read_beat(beat_path(self.run_dir, group, rank))
            return beat if beat and beat.phase in phases and beat.pid in self.workers(group) else None

        return self.until(found, f"group {group} in {phases}")

    def kill(self, *groups, signum=signal.SIGKILL, ranks=slice(None)):
        """Send a signal to the newest workers of these groups at once, and return the wall time."""
        pids = [pid for group in groups for pid in self.workers(group)[ranks]]
        when = time.time()
        for pid in pids:
            os.kill(pid, signum)
        return when

    def wait(self, deadline_s=DEADLINE_S):
        """Wait for the run to end by itself, and return its exit status."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end within {deadline_s:g} s: {self.console()[-2000:]}")

    def stop(self):
        """Stop the run cleanly, and return the number of steps that it made."""
        self.process.send_signal(signal.SIGINT)
        assert self.wait() == 0, self.console()
        return self.events("commit")[-1]["step"]

    def end(self):
        """Kill the run, with all that it started."""
        if self.process.poll() is None:
            tree = self.tree()
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(tree, timeout=10)


def assert_nothing_lost(run_dir, against, steps, statuses=("done",)):
    """Check that a run made `steps` steps, with the losses of `against` if given, and threw no survivor's work away."""
    figures = score.score(run_dir, against)
    assert figures["status"] in statuses, figures["reason"]
    assert (figures["first_step"], figures["last_step"], figures["steps"]) == (1, steps, steps)
    if against is not None:
        assert (figures["loss_delta_steps"], figures["loss_delta_undefined"]) == (steps, 0)
        assert figures["loss_delta_max"] <= LOSS_TOLERANCE
    for name in ("samples_lost", "samples_repeated", "attempts_thrown_away", "replicas_diverged"):
        assert figures[name] == 0, name
    return figures


def losses_match(run, start, config, *args):
    """Stop `run`, make as many steps in a run of one group without failures, and compare their losses."""
    steps = run.stop()
    reference = start(config, "--groups", "1", "--steps", str(steps), *args)
    assert reference.wait(600) == 0
    assert_nothing_lost(run.run_dir, reference.run_dir, steps, statuses=("stopped",))
