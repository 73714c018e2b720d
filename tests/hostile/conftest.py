import multiprocessing
import os
from pathlib import Path

import pytest


@pytest.fixture
def context():
    """Processes that start with everything imported, as those of tests/step."""
    os.environ.update(OMP_NUM_THREADS="1", RUST_LOG="warn")
    path = [str(Path(__file__).parents[1] / "step"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["member"])
    return context
