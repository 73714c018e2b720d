import multiprocessing
import os
from pathlib import Path

import pytest

from harness import Run


@pytest.fixture(scope="session")
def context():
    """Processes that start with everything imported."""
    os.environ.update(OMP_NUM_THREADS="1", RUST_LOG="warn")
    # Python 3.11's fork server ignores the path it is given, and preloads nothing that it does not find.
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["member"])
    return context


@pytest.fixture
def run(tmp_path, context):
    run = Run(tmp_path, context)
    yield run
    run.close()
