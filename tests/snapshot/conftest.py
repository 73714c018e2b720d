"""For the tests of snapshots."""

import pytest

from snapshot_cluster import in_keepers


@pytest.fixture
def scrubbing(monkeypatch, tmp_path):
    """Keepers that look at everything again all the time."""
    in_keepers(monkeypatch, tmp_path, "import everstep.snapshot.rank_watch as watch\nwatch.SCRUB_S = 0.3")


@pytest.fixture
def unmended(monkeypatch, tmp_path):
    """Keepers that do not look for a snapshot that vanished: the test is about what a start makes of it."""
    in_keepers(
        monkeypatch, tmp_path, "import everstep.snapshot.rank_watch as watch\nwatch.RankWatch._miss = lambda *_: None"
    )
