"""Runs that are submitted to a real Slurm."""

import os
import signal
import sys

import psutil

from everstep.launch import slurm
from everstep.run.directory import over_file
from forked import ran
from watched import Followed, Watched, assert_nothing_lost

ENDLESS = ("--training.steps", "100000")


class Submitted(Followed):
    """A run on the cluster, watched through its events."""

    def __init__(self, cluster, config, run_dir, *flags, groups=3):
        super().__init__(run_dir, deadline_s=180.0)
        self.cluster, self.config, self.groups = cluster, config, groups
        self.said = self.everstep(
            "submit", self.config, "--groups", self.groups, "--run-dir", self.run_dir, "--cpus-per-task=4", *flags
        )

    def everstep(self, *words, check=True):
        command = [sys.executable, "-m", "everstep.cli", *words]
        done = ran(command, env=self.cluster.environment, timeout=600.0)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    @property
    def jobs(self):
        return slurm.read_json(slurm.job_file(self.run_dir))

    def task(self, group):
        """Its name when the run was submitted."""
        return f"{self.jobs['groups'].partition(',')[0]}_{group}"

    def node_of(self, group):
        return next(t.nodes for t in self.tasks() if t.group == group)

    def tasks(self):
        os.environ["SLURM_CONF"] = self.cluster.environment["SLURM_CONF"]
        return slurm.states_of(self.jobs["groups"])

    def status(self):
        return self.everstep("status", self.run_dir, check=False)

    def stop(self):
        """A clean stop; the last step."""
        self.everstep("stop", self.run_dir)
        self.cluster.until(
            lambda: all(over_file(self.run_dir, group).exists() for group in range(self.groups)), "every group to end"
        )
        return self.events("commit")[-1]["step"]

    def assert_as_without_failures(self):
        """Stop; the losses are those of a run without failures, nothing is lost, no group was in a quorum twice."""
        steps, against = self.stop(), self.run_dir.with_name("reference")
        reference = Watched(self.config, against, "--groups", "1", "--steps", str(steps))
        try:
            assert reference.wait(600) == 0
        finally:
            reference.end()
        return self.assert_nothing_lost(steps, against)

    def assert_nothing_lost(self, steps, against=None):
        figures = assert_nothing_lost(self.run_dir, against, steps)
        commits = [(e["group"], e["step"], e["quorum_id"]) for e in self.events("commit", rank=0)]
        assert len(commits) == len(set(commits)), "two incarnations of a group committed in one quorum"
        return figures

    def end(self):
        """Nothing of it is left."""
        self.cluster.cancel_all()
        for event in (*self.events("workers_started"), *self.events("node_workers_started")):
            for pid in event["pids"]:
                _end(pid, event["t"])


def _end(pid, announced):
    try:
        process = psutil.Process(pid)
        if process.create_time() <= announced + 1:
            process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
