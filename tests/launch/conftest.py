"""Fixtures that start tiny runs and agents."""

import pytest

from launched import TinyAgent, TinyRun


@pytest.fixture
def agent(tmp_path, request):
    """Starts agents that share one run directory, tmp_path/run."""

    def _start(*flags, **settings):
        one = TinyAgent(tmp_path, *flags, **settings)
        request.addfinalizer(one.end)
        return one

    return _start


@pytest.fixture(scope="module")
def start(tmp_path_factory, request):
    def _start(*args, **kwargs):
        run = TinyRun(tmp_path_factory.mktemp("run") / "run", *args, **kwargs)
        request.addfinalizer(run.end)
        return run

    return _start
