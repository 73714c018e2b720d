"""Real training by the real batch scripts on a real Slurm, with all that Slurm does to jobs."""

import os
import shlex
import signal
import time

import psutil
import pytest

from everstep.chaos import signals
from everstep.launch import slurm
from everstep.run.directory import over_file
from slurm_cluster import Cluster, missing
from watched import Followed, Watched, assert_nothing_lost, everstep, until, write_config

pytestmark = pytest.mark.timeout(900)
ENDLESS = ("--training.steps", "100000")


class Submitted(Followed):
    """A run submitted to the cluster. Tests watch it through its events."""

    def __init__(self, cluster, config, run_dir, *flags, groups=3):
        super().__init__(run_dir)
        self.cluster, self.config, self.groups = cluster, config, groups
        self.everstep("submit", config, "--groups", groups, "--run-dir", run_dir, "--cpus-per-task=4", *flags)

    def everstep(self, *words, check=True):
        done = everstep(*words, env=self.cluster.environment, timeout=600.0)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    @property
    def jobs(self):
        return slurm.read_json(slurm.job_file(self.run_dir))

    def task(self, group):
        """Return Slurm's name of a group's task, as it was submitted first."""
        return f"{self.jobs['groups'].partition(',')[0]}_{group}"

    def node_of(self, group):
        return next(t.nodes for t in self.tasks() if t.group == group)

    def tasks(self):
        os.environ["SLURM_CONF"] = self.cluster.environment["SLURM_CONF"]
        return slurm.states_of(self.jobs["groups"])

    def status(self):
        return self.everstep("status", self.run_dir, check=False)

    def stop(self):
        """Stop the run cleanly, and return the last step."""
        self.everstep("stop", self.run_dir)
        files = [over_file(self.run_dir, group) for group in range(self.groups)]
        until(lambda: all(file.exists() for file in files), "every group to end")
        return self.events("commit")[-1]["step"]

    def assert_as_without_failures(self):
        """Stop; check that losses are those of a run without failures, and that no group was in a quorum twice."""
        steps, against = self.stop(), self.run_dir.with_name("reference")
        alone = ("--groups", "1", "--fault_tolerance.spares", "0", "--steps", str(steps))
        reference = Watched(self.config, against, *alone)
        try:
            assert reference.wait(600) == 0
        finally:
            reference.end()
        return self.assert_nothing_lost(steps, against)

    def assert_nothing_lost(self, steps, against=None):
        figures = assert_nothing_lost(self.run_dir, against, steps, statuses=("stopped",))
        commits = [(e["group"], e["step"], e["quorum_id"]) for e in self.events("commit", rank=0)]
        assert len(commits) == len(set(commits)), "two incarnations of a group committed in one quorum"
        return figures

    def end(self):
        self.cluster.cancel_all()
        for event in (*self.events("workers_started"), *self.events("node_workers_started")):
            for pid in event["pids"]:
                signals.send([(pid, event["t"])], signal.SIGKILL)


@pytest.fixture(scope="session")
def cluster():
    if why := missing():
        pytest.skip(why)
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def submit(cluster, tmp_path):
    started = []

    def _submit(*flags, groups=3, **sections):
        config = write_config(tmp_path / "tiny.toml", **{"training": {"global_batch_size": 6}, **sections})
        run = Submitted(cluster, config, tmp_path / "run", *ENDLESS, *flags, groups=groups)
        started.append(run)
        return run

    yield _submit
    for run in started:
        run.end()
    time.sleep(0.2)


def test_the_printed_commands_are_what_sbatch_takes(cluster, tmp_path):
    config = write_config(tmp_path / "tiny.toml", training={"global_batch_size": 12})
    words = ["--groups", "3", "--nodes-per-group", "2", "--run-dir", tmp_path / "run", "--dry-run"]
    printed = cluster.call("scripts/submit", config, *words, "--time=2:00:00", "--training.steps", "7").splitlines()
    assert [shlex.split(line)[0] for line in printed] == ["sbatch", "sbatch"]
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"
    (tmp_path / "run" / "logs").mkdir(parents=True)
    for line in printed:
        command = shlex.split(line)
        said = cluster.call(command[0], "--test-only", *command[1:])
        assert "to start at" in said
    assert "--array=0-2" in printed[1]
    assert "--nodes=2" in printed[1]
    assert printed[1].endswith("--ranks 1"), "the flags are in the settled config"


def test_a_killed_step_comes_back_and_nothing_is_lost(submit):
    run = submit(groups=2, training={"global_batch_size": 2})
    run.wait_for_step((0, 1))
    killed = time.time()
    run.cluster.call("scancel", "-s", "KILL", f"{run.task(1)}.0")
    run.wait_for_step((0,), after=killed)
    again = run.everstep("submit", run.config, "--groups", "2", "--run-dir", run.run_dir, check=False)
    assert "is submitted already" in again
    assert run.wait_for("agent_up", after=killed, group=1)["restart"] == 1
    run.wait_for_step((0, 1), after=run.wait_for("workers_started", after=killed, group=1)["t"])
    assert "RUNNING" in run.status()
    run.assert_nothing_lost(run.stop())
    until(lambda: not run.cluster.jobs().strip(), "the jobs to end by themselves")


@pytest.mark.slow
def test_a_run_has_fewer_groups_and_more_when_it_is_told(submit):
    run = submit(groups=2)
    run.wait_for_step((0, 1))
    for groups in (3, 1, 3):
        said, told = run.everstep("scale", run.run_dir, "--groups", groups), time.time()
        assert f"is to have {groups} groups" in said
        if groups == 1:
            until(lambda: {task.group for task in run.tasks()} == {0}, "one task")
            assert run.wait_for("agent_ended", after=told, group=2)["status"] == "stopped"
        run.wait_for_step(range(groups), after=told)
    run.groups = 3
    assert not run.events("workers_died")
    run.assert_as_without_failures()
    until(lambda: not run.cluster.jobs().strip(), "the jobs to end by themselves")


@pytest.fixture(scope="module")
def shared(cluster, tmp_path_factory):
    """One run of three groups. Each test leaves it with all groups taking part; the last test stops it."""
    config = write_config(tmp_path_factory.mktemp("shared") / "tiny.toml", training={"global_batch_size": 6})
    run = Submitted(cluster, config, config.parent / "run", *ENDLESS)
    run.wait_for_step((0, 1, 2))
    yield run
    run.end()


@pytest.mark.slow
def test_of_two_incarnations_only_the_later_one_trains(shared):
    node, frozen = shared.node_of(1), time.time()
    daemon = psutil.Process(shared.cluster.pid(f"slurmd.{node}.pid"))
    daemon.suspend()  # its step goes on: Slurm takes the node for dead and starts the group elsewhere
    try:
        up = shared.wait_for("agent_up", after=frozen, group=1)
        assert up["node"] != node
        fenced = shared.wait_for("agent_ended", after=up["t"], group=1, status="fenced")
        started = shared.wait_for("workers_started", after=up["t"], group=1)
        assert fenced["t"] < started["t"], "the old workers ended before the new ones began"
    finally:
        daemon.resume()
    shared.wait_for_step((0, 1, 2), after=started["t"])


@pytest.mark.slow
def test_the_lighthouse_job_comes_back_and_the_run_goes_on(shared):
    first, killed = shared.events("lighthouse_started")[-1], time.time()
    os.kill(first["pid"], signal.SIGKILL)
    second = shared.wait_for("lighthouse_started", after=killed)
    assert second["address"] == first["address"], "started again by its own process"
    shared.wait_for_step((0, 1, 2), after=second["t"])
    psutil.Process(second["pid"]).parent().kill()  # the whole job this time
    third = shared.wait_for("lighthouse_started", after=second["t"])
    shared.wait_for_step((0, 1, 2), after=third["t"])


@pytest.mark.slow
def test_workers_groups_and_lighthouse_are_hit_by_a_campaign(shared, tmp_path):
    faults = (
        'name = "kill-worker"\ngroup = 0', 'name = "kill-group"\ngroup = 1\npatience_s = 300',
        'name = "stop-worker"\ngroup = 2\nduration_s = 2.0\npatience_s = 300', 'name = "kill-lighthouse"',
    )  # fmt: skip
    path, begin = tmp_path / "campaign.toml", time.time()
    path.write_text("\n".join(f"[[fault]]\nat_step = 2\n{fault}" for fault in faults))
    said = shared.everstep("chaos", shared.run_dir, "--campaign", path)
    assert "4 faults" in said, said
    assert "rank 0 was killed by SIGKILL" in shared.wait_for("workers_died", after=begin, group=0)["reason"]
    shared.wait_for("workers_died", after=begin, group=1)
    shared.wait_for("fault_undone", after=begin, target_group=2)
    shared.wait_for("lighthouse_died", after=begin)
    shared.wait_for_step((0, 1, 2), after=time.time())
    refused = shared.everstep("chaos", shared.run_dir, "--every", "5", "--faults", "kill-host", check=False)
    assert "cannot be done to a run on slurm, only on local" in refused


@pytest.mark.slow
def test_nobody_notices_a_new_slurmctld(shared):
    # After the campaign: for a minute after its start, slurmctld may refuse the steps by which chaos sends signals.
    shared.cluster.stop_controller()
    away = time.time()
    shared.wait_for_step((0, 1, 2), after=away)
    shared.cluster.start_controller()
    shared.wait_for_step((0, 1, 2), after=time.time())
    assert shared.events("workers_died", after=away) == []


@pytest.mark.slow
def test_the_shared_run_lost_nothing_in_the_tests_above(shared):
    shared.assert_as_without_failures()


@pytest.mark.slow
def test_a_spare_takes_over_when_a_node_goes_down(submit):
    """It does so in the step in which the node dies. The dead group becomes the spare when Slurm has restarted it."""
    run = submit(fault_tolerance={"spares": 1})
    at_work = set(run.wait_for_step((0, 1, 2))["owners"])
    [spare], dead = {0, 1, 2} - at_work, min(at_work)
    left, node, killed = {0, 1, 2} - {dead}, run.node_of(dead), time.time()
    run.cluster.kill_node(node)
    try:
        first = run.until(
            lambda: [e for e in run.events("commit", killed, group=spare) if set(e["groups"]) == left], "a step without"
        )[0]
        assert set(first["owners"]) == left, "the spare computes in the first step that is made without the dead group"
        up = run.wait_for("agent_up", after=killed, group=dead)
        assert up["node"] != node
        assert first["t"] < up["t"], "Slurm was not waited for"
        started = run.wait_for("workers_started", after=up["t"], group=dead)
        assert set(run.wait_for_step((0, 1, 2), after=started["t"])["owners"]) == left
    finally:
        run.cluster.start_node(node)
    run.assert_as_without_failures()


@pytest.mark.slow
def test_a_preempted_group_leaves_cleanly_and_comes_back(submit):
    run = submit("--exclusive")
    run.wait_for_step((0, 1, 2))
    node, asked = run.node_of(1), time.time()
    urgent = ("--parsable", "--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null")
    run.cluster.call("sbatch", *urgent, "--wrap=sleep 20")
    left = run.wait_for("left", after=asked, group=1)
    assert not [e for e in run.events("workers_died", after=asked) if e["t"] < left["t"] + 1]
    run.wait_for_step((0, 2), after=left["t"])
    up = run.wait_for("agent_up", after=asked, group=1)
    assert up["restart"] == 1
    run.wait_for_step((0, 1, 2), after=up["t"])
    figures = run.assert_as_without_failures()
    assert figures["deaths_unprovoked"] == 0


@pytest.mark.slow
def test_a_group_that_a_person_cancels_stays_cancelled(submit):
    run = submit()
    run.wait_for_step((0, 1, 2))
    cancelled = time.time()
    run.cluster.call("scancel", run.task(2))  # the last task: its id is also the array's
    run.wait_for_step((0, 1), after=cancelled)
    until(lambda: {task.group for task in run.tasks()} == {0, 1}, "two tasks")
    run.cluster.call("scancel", run.jobs["lighthouse"])
    for job in (run.task(2), run.jobs["lighthouse"]):
        until(lambda job=job: "JobState=CANCELLED" in run.cluster.call("scontrol", "show", "job", job), "its end")
    again = run.everstep("submit", run.config, "--groups", "3", "--run-dir", run.run_dir, "--training.steps", "100000")
    assert f"job {run.jobs['groups']}, array" in again, "the groups are as they were"
    run.wait_for_step((0, 1), after=run.wait_for("lighthouse_started", after=cancelled)["t"])
