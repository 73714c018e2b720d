"""One cluster for all tests here; each test has runs of its own."""

import time

import pytest

from slurm_cluster import Cluster, missing
from slurm_runs import ENDLESS, Submitted
from watched import write_config


@pytest.fixture(scope="session")
def cluster():
    if why := missing():
        pytest.skip(why)
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits a run; whatever is left of it ends with the test."""
    started = []

    def _submit(*flags, groups=3, **sections):
        config = write_config(tmp_path / "tiny.toml", **{"training": {"global_batch_size": 6}, **sections})
        run = Submitted(cluster, config, tmp_path / "run", *ENDLESS, *flags, groups=groups)
        started.append(run)
        return run

    yield _submit
    for run in started:
        run.end()
    time.sleep(0.2)
