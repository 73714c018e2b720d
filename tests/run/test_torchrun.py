"""A group that torchrun starts, as on a cluster: torchtitan's own command line and a separate lighthouse."""

import os
import signal
import subprocess
import sys
import time

import psutil

from everstep.commands.status import status_of
from everstep.launch import orphans
from everstep.launch.machine import free_port
from everstep.launch.slurm import has_ended
from everstep.report import score
from everstep.run.beats import lighthouse_beat_path, read_beat
from everstep.run.events import EventLog
from forked import Forked
from watched import DEADLINE_S, Followed, assert_nothing_lost, environment, until, write_config


class Torchrun(Followed):
    """Groups of one rank and their lighthouse. The first is started with torchrun's variables, without it."""

    def __init__(self, config, run_dir):
        super().__init__(run_dir)
        self.config, self.processes = config, []
        run_dir.mkdir()
        port = free_port("127.0.0.1")
        bind = ("--bind", f"127.0.0.1:{port}", "--run-dir", run_dir)
        timeouts = ("--min-groups", "1", "--join-timeout-s", "1.0", "--heartbeat-timeout-s", "2.0")
        self.start("lighthouse", "-m", "everstep.quorum.lighthouse", *bind, *timeouts)
        self.lighthouse = f"http://127.0.0.1:{port}"
        until(lambda: read_beat(lighthouse_beat_path(run_dir)), "the lighthouse to serve")

    def start(self, name, *words, **more):
        """Start a Python process with a log of this name."""
        with (self.run_dir / f"{name}.log").open("wb") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            process = Forked([sys.executable, *words], **streams, env=environment(**more), cwd=self.run_dir)
        self.processes.append(process)
        return process

    def group(self, group):
        torchrun = (
            "-m", "torch.distributed.run", "--nproc_per_node", "1", "--max_restarts", "3", "--rdzv_backend", "c10d",
            "--rdzv_endpoint", "127.0.0.1:0", "--local_addr", "127.0.0.1",
        )  # fmt: skip
        trainer = (
            "-m", "everstep.train", "--module", "everstep", "--config", self.config, "--dump_folder", self.run_dir,
            "--fault_tolerance.group_id", group, "--fault_tolerance.bind_host", "127.0.0.1",
            "--fault_tolerance.lighthouse", self.lighthouse,
        )  # fmt: skip
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        alone["MASTER_PORT"] = str(free_port("127.0.0.1"))
        words, more = ((*torchrun, *trainer), {}) if group else (trainer, alone)
        return self.start(f"group-{group}", *words, EVERSTEP_TEST_PACE_S="0.5", **more)

    def end(self):
        """End all processes, with those below them."""
        for process in self.processes:
            if process.poll() is None:
                below = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                orphans.kill(below)
                process.wait()


def test_a_group_of_torchrun_trains_with_another_and_survives_a_kill(tmp_path, request):
    # More steps than the remaining group can make before torchrun has restarted the killed one.
    config = write_config(tmp_path / "torchrun.toml", training={"steps": 10_000}, fault_tolerance={"groups": 2})
    run = Torchrun(config, tmp_path / "run")
    request.addfinalizer(run.end)
    EventLog(run.run_dir, None, None, "supervisor").emit("run_ended", status="failed", reason="an earlier start")
    groups = [run.group(0), run.group(1)]
    run.wait_for_step((0, 1))
    assert "run     running (processes of group-0, group-1)" in status_of(run.run_dir)
    assert (score.score(run.run_dir)["status"], has_ended(run.run_dir)) == ("running", False)
    victim, killed = run.wait_for("worker_ready", group=1), time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    run.wait_for("commit", after=killed + 1.0, group=1)
    assert [process.poll() for process in groups] == [None, None]
    # The signal goes to torchrun's worker: SIGTERM to torchrun itself would end the worker without its last step.
    for process in (groups[0], *psutil.Process(groups[1].pid).children()):
        process.send_signal(signal.SIGTERM)
    assert [process.wait(DEADLINE_S) for process in groups] == [0, 0]
    assert (run.run_dir / "checkpoint").exists()
    open_to_all = {path for path in run.run_dir.rglob("*") if path.lstat().st_mode & 0o022 and not path.is_symlink()}
    titans = run.run_dir / "structured_logs"  # which torchtitan opens first
    assert open_to_all <= {titans, *titans.rglob("*")}
    assert has_ended(run.run_dir)
    steps = max(event["step"] for event in run.events("commit"))
    assert steps > 2
    assert_nothing_lost(run.run_dir, None, steps)
