import pytest

from harness import Run


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()
