"""For all tests."""

import atexit
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch. Its pool of threads spins while it waits: two of them on two cores, and a test of small
# tensors takes ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A loaded machine takes longer for an example than any limit that a quiet one needs.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# What is started in the background by a shell ignores SIGINT, and so would all processes that tests send one to.
signal.signal(signal.SIGINT, signal.default_int_handler)


FIRST = (
    "run/test_exact.py", "slurm/test_runs.py", "simulation/test_simulation.py", "run/test_faults.py",
    "step/test_processes.py", "run/test_torchrun.py", "run/test_shapes.py", "semi/test_runs.py",
    "semi/test_storage.py", "run/test_sick.py", "device/test_runs.py", "device/test_late.py",
    "recipes/test_recipes.py", "snapshot/test_losses.py", "launch/test_processes.py", "launch/test_wheel.py",
    "attention/test_override.py",
)  # fmt: skip
"""The files that take longest. Those that wait most go with those that compute most."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(place)))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process here, with pytest's status: Python would abort (134) if threads hang in torch."""
    session = config.pluginmanager.get_plugin("session")
    if session is None:
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(session.exitstatus)
