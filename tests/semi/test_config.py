"""`[semi_sync]` that cannot work is refused before anything starts, in one sentence."""

import pytest

from everstep.config.errors import ConfigError
from everstep.config.resolved import config_identity
from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer

GOOD = """\
[job]
module = "llama3"
config = "llama3_debugmodel"
[training]
steps = 100
disable_cuda_graphs = true
local_batch_size = 2
global_batch_size = 24
[data]
source = "stdlib"
[fault_tolerance]
enable = true
groups = 3
[semi_sync]
method = "diloco"
workers = 4
sync_steps = 10
"""


@pytest.fixture
def load(tmp_path):
    def _load(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_config(path, EverstepTrainer.Config)

    return _load


REFUSED = {
    "workers that do not divide the batch": (
        GOOD.replace("workers = 4", "workers = 5"),
        "[semi_sync] workers = 5 must divide the batch: global_batch_size = 24 is no multiple of 5 workers x "
        "local_batch_size = 2",
    ),
    "fewer workers than groups": (
        GOOD.replace("workers = 4", "workers = 2"),
        "[semi_sync] workers = 2 must be at least groups = 3: each carries one",
    ),
    "fragments that are not equally far apart": (
        GOOD + "fragments = 3\n",
        "[semi_sync] sync_steps = 10 must be a multiple of fragments = 3: they are synchronised in turn, equally far "
        "apart",
    ),
    "snapshots": (
        GOOD + "[snapshot]\nenable = true\n",
        '[snapshot] enable must be false with [semi_sync] method = "diloco": the other is not built yet',
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused(load, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert message in str(caught.value)


def test_a_run_directory_belongs_to_one_number_of_workers_and_not_of_groups(load):
    identity = config_identity(load(GOOD))
    assert config_identity(load(GOOD.replace("groups = 3", "groups = 2"))) == identity
    assert config_identity(load(GOOD.replace("workers = 4", "workers = 3"))) != identity
    by_groups = GOOD.replace("workers = 4\n", "").replace("global_batch_size = 24", "global_batch_size = 12")
    assert config_identity(load(by_groups)) != config_identity(load(by_groups.replace("groups = 3", "groups = 2")))
