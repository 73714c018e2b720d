"""The calls of Slurm's commands, and the use of their answers, with fake commands."""

import fcntl
import os
import struct
import subprocess
from pathlib import Path

import pytest

from everstep.chaos import cluster
from everstep.chaos.view import Proc, View
from everstep.launch import slurm
from everstep.run import files
from everstep.run.directory import LaunchError, over_file, require_events, stop_file
from everstep.run.events import EventLog
from everstep.run.files import write_json


def fake(folder, **commands):
    """Write shell scripts that stand in for commands: name -> what it does."""
    for name, does in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """Makes a fake squeue that answers with the given lines, for a run of two jobs. The file `asked` has its calls."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")  # of the user's own views
    write_json(slurm.job_file(tmp_path), {"groups": "7", "lighthouse": "9"})

    def answer(*lines):
        said = "".join(f'case "$*" in *--jobs={line.partition("|")[0]}*) echo "{line}";; esac\n' for line in lines)
        fake(tmp_path, squeue=f'echo "$*$SQUEUE_STATES" >>{tmp_path}/asked\n{said}')
        return tmp_path

    return answer


def test_a_lighthouse_whose_job_is_cleaned_up_is_submitted_again(squeue):
    run_dir = squeue("7|0|7|RUNNING|n1|None", "9|N/A|9|COMPLETING|n2|None")
    assert slurm.alive_jobs(run_dir) == {"groups": "7"}
    assert "PENDING" not in (run_dir / "asked").read_text(), "the filters of the user's own views would hide jobs"


def test_a_lighthouse_without_groups_is_replaced_as_it_may_be_about_to_end(squeue):
    run_dir = squeue("9|N/A|9|RUNNING|n2|None")
    fake(run_dir, scancel=f'echo "scancel $*" >>{run_dir}/done', sbatch=f'echo "sbatch $*" >>{run_dir}/done\necho 12')
    assert slurm.submit(slurm.Submission(run_dir / "run.toml", run_dir, 1)) == {"lighthouse": "12", "groups": "12"}
    done = (run_dir / "done").read_text()
    assert done.startswith(f"scancel --quiet 9\nsbatch --parsable --chdir={Path.cwd()} --job-name=run-lighthouse")


def test_a_lighthouse_is_cancelled_when_the_groups_are_refused(squeue):
    run_dir = squeue()
    fake(run_dir, sbatch='case "$*" in *--array*) exit 1;; esac\necho 12', scancel=f"echo $* >{run_dir}/done")
    require_events(run_dir)  # `status` and `stop` are for jobs that are pending, too
    with pytest.raises(LaunchError, match="--array=0-0"):
        slurm.submit(slurm.Submission(run_dir / "run.toml", run_dir, 1))
    assert (run_dir / "done").read_text() == "--quiet 12\n"


def test_a_job_knows_its_everstep_and_not_more_of_the_environment_than_it_is_to_know(tmp_path):
    fake(tmp_path, everstep='echo "$@"')
    run_dir = tmp_path / "80%j"
    words = slurm.Submission(tmp_path / "run.toml", run_dir, 1, lighthouse_flags=["--export=NONE"]).commands()
    assert f"--output={tmp_path}/80%%j/logs/group-%a/job.log" in words["groups"], "sbatch would replace %j"
    job = words["lighthouse"][words["lighthouse"].index("--export=NONE") + 1 :]
    job[1] = str(tmp_path / "everstep")
    said = subprocess.run(["bash", *job], env={"PATH": os.defpath}, capture_output=True, text=True).stdout
    assert said == f"lighthouse {run_dir / 'config.toml'} --run-dir {run_dir}\n"


def test_a_stop_is_asked_for_where_slurm_cannot_be(tmp_path, squeue):
    assert "there is no squeue here" in slurm.stop(tmp_path)
    assert stop_file(tmp_path).exists()


def test_a_run_that_has_ended_is_not_asked_to_stop(tmp_path, squeue):
    EventLog(tmp_path / "local", None, None, "supervisor").emit("run_ended", status="done", reason="")
    write_json(over_file(tmp_path, 0), {"status": "done", "reason": ""})
    for run_dir in (tmp_path / "local", tmp_path):
        assert slurm.stop(run_dir) == f"nothing runs in {run_dir}: the run has ended"
        assert not stop_file(run_dir).exists()


def test_a_run_whose_tasks_were_all_pending_has_ended_when_it_is_stopped(squeue):
    run_dir = squeue("7|0|7|PENDING|n1|Priority")
    fake(run_dir, scancel="")
    assert "cancelled the tasks" in slurm.stop(run_dir)
    assert slurm.has_ended(run_dir), "everstep watch ends"


@pytest.mark.parametrize("pid", [0, -7], ids=["other container", "other machine"])
def test_a_run_whose_launcher_has_no_pid_here_is_asked_to_stop(tmp_path, monkeypatch, pid):
    EventLog(tmp_path, None, None, "supervisor").emit("run_started")
    (tmp_path / ".lock").touch()
    locked = struct.pack(files._FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, pid)  # what the kernel answers then
    monkeypatch.setattr(files.fcntl, "fcntl", lambda *_: locked)
    with pytest.raises(LaunchError, match="a run that is still going"):
        slurm.alive_jobs(tmp_path)  # `submit` would end its groups
    assert "asked every group" in slurm.stop(tmp_path)
    assert stop_file(tmp_path).exists()


@pytest.mark.parametrize(("script", "status"), [("lighthouse", 2), ("train", 1)])
def test_a_job_that_never_does_its_work_is_requeued_five_times(tmp_path, script, status):
    """The lighthouse cannot serve; the groups' time limit is so short that Slurm sends TERM when they start."""
    fake(tmp_path, squeue="echo RUNNING$SQUEUE_STATES", scontrol=f"echo $1 >>{tmp_path}/requeued", venv="exit 2")
    fake(tmp_path, srun="kill -TERM $PPID; sleep 0.2; exit 1", scancel="")
    task = dict.fromkeys(("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NODELIST"), "9")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EVERSTEP": str(tmp_path / "venv"), "SQUEUE_STATES": "x"} | task
    job = ["bash", slurm.SCRIPTS / f"{script}.sbatch", "run.toml", "--run-dir", tmp_path]
    assert [subprocess.run(job, env=path, umask=0).returncode for _ in range(6)] == [status] * 5 + [3]
    assert (tmp_path / "state").stat().st_mode & 0o022 == 0
    assert subprocess.run(job[:-2], env=path, capture_output=True).returncode != 0, "it would write to /state"
    assert (tmp_path / "requeued").read_text() == "requeue\n" * 5


def test_slurm_is_asked_once_whom_to_signal(squeue, monkeypatch):
    run_dir, sent = squeue("7|0|12|RUNNING|n1|None", "7|1|7|RUNNING|n2|None"), []
    target = cluster.SlurmTarget(View(run_dir, one_host=False))
    monkeypatch.setattr(cluster, "send_on", lambda job, node, procs, signum: sent.append((job, procs)) or [0])
    workers = [Proc(pid, 1.0, "worker", pid % 2) for pid in range(2, 6)]
    before = (run_dir / "asked").read_text().count("\n")
    target.signal(workers, 9)
    assert dict(sent) == {"12": [(2, 1.0), (4, 1.0)], "7": [(3, 1.0), (5, 1.0)]}
    assert (run_dir / "asked").read_text().count("\n") == before + 1
