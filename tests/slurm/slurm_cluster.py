"""A real Slurm on this machine: slurmctld, munge and four virtual nodes on loopback, from Debian's packages."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil

from everstep.launch import orphans
from everstep.launch.machine import free_port
from watched import environment, until

NODES = ("n1", "n2", "n3", "n4")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")

CONF = Path(__file__).with_name("slurm.conf")
"""The cluster's, with {} for its folder, host and ports."""


def missing() -> str:
    """Return why a cluster cannot be started here; "" if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no {absent[0]}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "virtual nodes need root"


class Cluster:
    """The cluster. `start` brings it up; `close` ends all of its processes, those of jobs included."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="everstep-slurm-"))
        self.home.chmod(0o755)  # munge refuses a folder that others can write to
        for folder in ("state", *(f"spool/{node}" for node in NODES)):
            (self.home / folder).mkdir(parents=True)
        self.environment = environment(SLURM_CONF=str(self.home / "slurm.conf"), EVERSTEP_TEST_PACE_S="0.5")

    def start(self) -> None:
        ports = list({free_port() for _ in range(9)})  # one may come twice
        conf = CONF.read_text().format(home=self.home, host=socket.gethostname(), ports=ports)
        (self.home / "slurm.conf").write_text(conf)
        self.call("mungekey", "-c", "-k", self.home / "munge.key")
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.call("munged", *(f"--{flag}={self.home}/munge.{name}" for flag, name in files.items()))
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        listed = ("sinfo", "-h", "-N", "-t", "idle,mix,alloc", "-o", "%N")
        until(lambda: set(self.call(*listed, check=False).split()).issuperset(NODES), "four idle nodes")

    def call(self, *command, check: bool = True) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def start_controller(self) -> None:
        self.call("slurmctld", "-i")

    def stop_controller(self) -> None:
        daemon = psutil.Process(self.pid("slurmctld.pid"))
        daemon.terminate()
        daemon.wait(20)

    def start_node(self, node: str) -> None:
        self.call("slurmd", "-N", node)

    def node_processes(self, node: str) -> list[psutil.Process]:
        """Return the slurmd of a node, its step daemons and all processes below these."""
        daemon = psutil.Process(self.pid(f"slurmd.{node}.pid"))
        steps = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "slurmstepd"]
        mine = [p for p in steps if self.step_node(p) == node]
        return [daemon, *(child for step in mine for child in (step, *step.children(recursive=True)))]

    def step_node(self, step: psutil.Process) -> str:
        """Return the node of a slurmstepd, from the environment of a process that it started."""
        for child in step.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                return child.environ().get("SLURMD_NODENAME", "")
        return ""

    def kill_node(self, node: str) -> None:
        """Kill all processes of the node at once, as a power failure does."""
        orphans.kill(self.node_processes(node))

    def pid(self, name: str) -> int:
        return int((self.home / name).read_text())

    def jobs(self) -> str:
        return self.call("squeue", "-h", check=False)

    def cancel_all(self) -> None:
        self.call("scancel", "--full", "-s", "KILL", "-u", "root", check=False)
        self.call("scancel", "-u", "root", check=False)
        until(lambda: not self.jobs().strip(), "the jobs to end")

    def close(self) -> None:
        """Kill all processes with this cluster's SLURM_CONF, daemons and orphans of dead nodes included."""
        while left := self.processes():
            orphans.kill(left)
            psutil.wait_procs(left, timeout=1)
        shutil.rmtree(self.home, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        mine, found = self.environment["SLURM_CONF"], []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == mine:
                    found.append(process)
        return found
