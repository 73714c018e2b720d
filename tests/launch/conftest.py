"""Fixtures that start tiny runs and agents."""

import pytest

from launched import TinyAgent, TinyRun


@pytest.fixture
def agent(tmp_path):
    """Starts agents that share one run directory, tmp_path/run."""
    started = []

    def _start(*flags, **settings):
        started.append(TinyAgent(tmp_path, *flags, **settings))
        return started[-1]

    yield _start
    for one in started:
        one.end()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    runs = []

    def _start(*args, **kwargs):
        run = TinyRun(tmp_path_factory.mktemp("run") / "run", *args, **kwargs)
        runs.append(run)
        return run

    yield _start
    for run in runs:
        run.end()
