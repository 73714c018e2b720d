"""An agent as a batch job starts it, and the environment of its workers."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import psutil

from everstep.launch.machine import limited_threads
from everstep.launch.rendezvous import RendezvousRound
from everstep.launch.restart_rules import Death, failures
from everstep.launch.settings import GroupSettings
from everstep.launch.worker import log_path
from everstep.run.events import EventLog
from everstep.run.exits import GAVE_UP_EXIT
from everstep.run.files import write_json
from forked import ran
from launched import DEADLINE_S, FULL, alive, on_a_full_disk, until


def both_train(agent):
    return {event["rank"] for event in agent.events("training_started")} == {0, 1}


def test_workers_of_a_batch_job_share_the_cores_unless_they_are_told_how_many(agent, monkeypatch):
    one = agent("--training.steps", "3", job=7, environment={"OMP_NUM_THREADS": ""})
    assert (one.process.wait(DEADLINE_S), one.events("agent_ended")[0]["status"]) == (0, "done")
    assert f"trains with {max(1, len(os.sched_getaffinity(0)) // 2)} threads" in log_path(one.run_dir, 0, 0).read_text()
    assert list(one.temporary.iterdir()) == []
    for said, shared in (("7", {}), ("0", {"OMP_NUM_THREADS": "1"})):  # torch refuses 0 threads
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert limited_threads(1 << 20) == shared


def test_workers_of_an_exact_run_have_as_many_threads_as_in_its_first_start(agent, tmp_path):
    write_json(tmp_path / "run" / "state" / "exact.json", {"threads": "3"})
    one = agent("--training.steps", "3", exact=True, environment={"OMP_NUM_THREADS": ""})
    assert (one.process.wait(DEADLINE_S), "with 3 threads" in log_path(one.run_dir, 0, 0).read_text()) == (0, True)


def test_a_rank_that_leaves_with_status_0_before_it_is_done_has_died(agent):
    one = agent("--training.steps", "1000000", "--tiny.vanish", "1")
    died = one.wait_for("workers_died")
    assert (died["reason"], died["exitcodes"]) == ("rank 1 exited with status 0", {"1": 0})
    one.wait_for("workers_started", incarnation=1)


def test_an_agent_is_not_given_up_for_failing_faster_than_others_make_steps(agent):
    """For instance while a GPU's memory is not free yet. The agent knows other groups only by their events."""
    one = agent("--training.steps", "9", "--tiny.fail_in", "1", ranks=1, groups=2, environment={"OMP_NUM_THREADS": "1"})
    commit = {"groups": [1], "loss": 1.0, "tokens": 1, "history": "a", "parent": "b", "took_s": 30.0}
    EventLog(one.run_dir, 1, 0, "worker").emit("commit", step=7, **commit)
    one.wait_for("workers_started", incarnation=3)
    assert one.events("agent_ended") == []


def test_a_failure_before_others_made_steps_counts_no_more():
    then = Death(1.0, 1, committed=False, reason="", error="", run_step=5, step_s=1.0, by_itself=True)
    now = [replace(then, mono=mono, run_step=9) for mono in (100.0, 101.0, 110.0)]
    assert failures([then], 5) == 1
    assert failures([then], 9) == 0, "it is healing again, while another group fails"
    assert [failures(now[:count], 9) for count in (0, 1, 2, 3)] == [0, 1, 1, 3]


@on_a_full_disk
def test_an_agent_whose_output_is_on_a_full_disk_counts_deaths_and_says_how_it_ends(agent):
    one = agent("--training.steps", "9", "--tiny.fail_in", "2", ranks=1, output=FULL)
    assert (one.process.wait(DEADLINE_S), len(one.events("workers_died"))) == (GAVE_UP_EXIT, 3)
    assert one.events("agent_ended")[0]["status"] == "failed"


def test_a_batch_systems_sigterm_to_every_process_is_a_clean_stop(agent):
    one = agent("--training.steps", "1000000")
    until(lambda: both_train(one), "both ranks to train")
    os.killpg(one.process.pid, signal.SIGTERM)
    assert (one.process.wait(DEADLINE_S), {event["rank"] for event in one.events("left")}) == (0, {0, 1})
    assert one.events("agent_ended")[0]["status"] == "stopped"


def test_workers_that_do_not_end_within_the_grace_time_are_killed(agent):
    one = agent("--training.steps", "1000000", stop_grace_s=1.0, stall_timeout_s=2.0)
    until(lambda: both_train(one), "both ranks to train")
    below = psutil.Process(one.process.pid).children(recursive=True)
    first = one.events("workers_started")[0]["pids"][0]
    serving = [child.pid for child in below if any(c.status == "LISTEN" for c in child.net_connections("inet"))]
    assert serving == [first], "no other process keeps the port of the group's store open"
    os.kill(first, signal.SIGSTOP)
    asked = time.monotonic()
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(DEADLINE_S) == 1
    assert one.events("agent_ended")[0]["reason"] == "its workers did not stop within 3 s and were killed"
    assert time.monotonic() - asked >= 3.0
    until(lambda: not any(alive(child.pid) for child in below), "all below the agent to end")


def test_a_worker_that_has_finished_and_does_not_end_is_stalled_and_links_in_place_of_logs_lead_nowhere(
    agent, tmp_path
):
    logs = [log_path(tmp_path / "run", 0, 0).with_suffix(suffix) for suffix in (".log", ".stacks")]
    logs[0].parent.mkdir(parents=True)
    for log in logs:
        log.symlink_to(tmp_path / "mine")
    one = agent("--training.steps", "2", "--tiny.linger", ranks=1, stall_timeout_s=2.0)
    assert (one.process.wait(DEADLINE_S), one.events("workers_stalled")[0]["phase"]) == (0, "done")
    assert not (tmp_path / "mine").exists()
    assert all(log.is_file() for log in logs)


def test_a_worker_finds_what_torchrun_would_have_set(tmp_path):
    """The variables are those that this version of torchrun sets."""
    script = tmp_path / "script.py"
    script.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH")}
    done = ran([sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)], env=environment)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for_the_agent, of_its_own = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}, {"TORCHELASTIC_ERROR_FILE"}
    ours = RendezvousRound(GroupSettings(tmp_path, 0, 1), "127.0.0.1", 1, None).environment(0, 0)
    assert theirs.keys() - environment.keys() - for_the_agent == ours.keys() | of_its_own
    other = {"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"}
    alike = ours.keys() - other
    assert {name: theirs[name] for name in alike} == {name: ours[name] for name in alike}
