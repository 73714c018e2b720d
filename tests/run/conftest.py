"""Real runs of torchtitan's debug models on the CPU, one at a time."""

import pytest

from watched import Watched


@pytest.fixture(scope="module")
def start(tmp_path_factory, request):
    """Starts `everstep run` in a new directory (or in `run_dir`). All that it starts is ended after the module."""

    def _start(config, *args, run_dir=None, pace_s=0.0):
        run_dir = run_dir or tmp_path_factory.mktemp(config.stem) / "run"
        run = Watched(config, run_dir, *args, pace_s=pace_s)
        request.addfinalizer(run.end)
        return run

    return _start
