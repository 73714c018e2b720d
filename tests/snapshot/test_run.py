"""A real run with snapshots."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

from everstep.snapshot import peers
from watched import Watched, environment, write_config


@pytest.mark.slow
def test_a_run_without_room_for_snapshots_trains_and_says_so(tmp_path):
    """As with the 64 MB of /dev/shm that Docker gives."""
    config = write_config(tmp_path / "run.toml", snapshot={"enable": True}, training={"steps": 8})
    run = Watched(config, tmp_path / "run", "--groups", "2", "--snapshot.memory_reserve_gb", "1e6")

    def says(command):
        words = [sys.executable, "-m", "everstep.cli", command, str(run.run_dir)]
        return subprocess.run(words, capture_output=True, text=True, check=True, env=environment()).stdout

    try:
        run.wait_for("commit", step=4)
        unprotected, failed = "UNPROTECTED: no snapshot is coded", "was not taken: snapshots need"
        run.until(lambda: unprotected in (said := says("status")) and failed in said, "status")
        assert run.wait() == 0
        assert failed in run.said()
        assert unprotected in run.said(), "the summary at the end"
        assert unprotected in says("report")
        assert "UNPROTECTED" in (run.run_dir / "report.html").read_text()
    finally:
        run.end()
        for place in peers.read_places(run.run_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)
            shutil.rmtree(place.segment, ignore_errors=True)
