"""Processes that have the device "late", which a test's own process must not have: all of its PyTorch would see it."""

import os
import subprocess
import sys
from pathlib import Path

from watched import Watched

HERE = Path(__file__).parent


def environment(log: Path | None = None) -> dict[str, str]:
    """Of a process with the device, built if it is not. `log`: EVERSTEP_TEST_DEVICE_LOG."""
    from late.build import library

    library()
    own = {"EVERSTEP_TEST_DEVICE": "late", "PYTHONPATH": os.pathsep.join([str(HERE / "site"), *sys.path])}
    own |= {"OMP_NUM_THREADS": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # all ranks share the one device there is
    return {**os.environ, **own, **({"EVERSTEP_TEST_DEVICE_LOG": str(log)} if log else {})}


class LateRun(Watched):
    """An `everstep run` on the device. What its processes say of races and of waits is in the folder `log`."""

    def __init__(self, config, run_dir, *args, **more):
        self.log = run_dir.parent / "log"
        self.log.mkdir(exist_ok=True)
        super().__init__(config, run_dir, *args, **more)

    def starts(self, argv, *, env, **options):
        return subprocess.Popen(argv, env={**env, **environment(self.log)}, **options)

    def races(self):
        return [path.read_text() for path in sorted(self.log.glob("races-*.txt"))]

    def connected_in(self):
        """Names of the threads in which communicators between groups connected to their peers."""
        return {line for path in self.log.glob("rings-*.txt") for line in path.read_text().splitlines()}

    def waits(self, pid):
        """For each time that the host waited for the device: why, and the frames from the innermost on."""
        found = []
        for line in (self.log / f"waits-{pid}.txt").read_text().splitlines():
            why, *frames = [part.strip() for part in line.replace("      ", "|", 1).split("|")]
            found.append((why, [frame for frame in frames if frame]))
        return found
