"""Processes that have the device "late", which a test's own process must not have: all of its PyTorch would see it."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def environment(log: Path | None = None) -> dict[str, str]:
    """Of a process with the device, built if it is not. `log`: EVERSTEP_TEST_DEVICE_LOG."""
    from late.build import library

    library()
    paths = [str(HERE / "site"), str(HERE), os.environ.get("PYTHONPATH", "")]
    own = {"EVERSTEP_TEST_DEVICE": "late", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**os.environ, **own, **({"EVERSTEP_TEST_DEVICE_LOG": str(log)} if log else {})}


def run(*argv: object, env: dict[str, str]) -> str:
    """What `python ARGV` prints; fails with what it says if it fails."""
    command = [sys.executable, *map(str, argv)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
