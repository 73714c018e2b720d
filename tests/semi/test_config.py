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
    "half a round at the end": (
        GOOD.replace("steps = 100", "steps = 105"),
        "[training] steps = 105 must be a multiple of [semi_sync] sync_steps = 10: between two rounds there are no "
        "global parameters",
    ),
    "a checkpoint within a round": (
        GOOD + "[checkpoint]\nenable = true\ninterval = 25\n",
        "[checkpoint] interval = 25 must be a multiple of [semi_sync] sync_steps = 10: between two rounds there are "
        "no global parameters",
    ),
    "no groups": (
        GOOD.replace("enable = true", "enable = false"),
        '[semi_sync] method = "diloco" needs [fault_tolerance] enable = true',
    ),
    "an outer optimizer that local SGD has not": (
        GOOD.replace("diloco", "local_sgd") + "outer_lr = 0.5\n",
        '[semi_sync] outer_lr is read with method = "diloco" only, but method is "local_sgd"',
    ),
    "a sum that would outlast a fragment's round": (
        GOOD + "fragments = 5\noverlap_steps = 2\n",
        "[semi_sync] overlap_steps = 2 must be at least 0 and less than sync_steps / fragments = 2: a sum ends before "
        "the next begins",
    ),
    "more fragments than layers": (
        GOOD + "fragments = 10\n",
        "[semi_sync] fragments = 10 must be at most the model's 6 layers, each of which is in one fragment",
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
    "a pipeline": (
        GOOD + "[parallelism]\npipeline_parallel_degree = 2\n",
        '[parallelism] pipeline_parallel_degree must be 1 with [semi_sync] method = "diloco": the other is not '
        "built yet",
    ),
    "shrinking by slots": (
        GOOD.replace("groups = 3", 'groups = 3\non_loss = "shrink"'),
        '[fault_tolerance] on_loss must be "redistribute" with [semi_sync] method = "diloco"',
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_work_is_refused(load, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert message in str(caught.value)


def test_a_good_one_is_accepted_and_counts_rounds(load):
    config = load(GOOD)
    assert config.semi_sync.commits(config.training.steps) == 10
    assert (config.semi_sync.outer_lr, config.semi_sync.outer_momentum) == (0.7, 0.9), "the paper's"


def test_02s_name_of_a_model_is_known(load):
    job = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'
    assert load(GOOD.replace(job, '[model]\nname = "llama3_ft"\nflavor = "debugmodel"\n')).model_spec.name == "llama3"


def test_a_run_directory_belongs_to_one_number_of_workers_and_not_of_groups(load):
    identity = config_identity(load(GOOD))
    assert config_identity(load(GOOD.replace("groups = 3", "groups = 2"))) == identity
    assert config_identity(load(GOOD.replace("workers = 4", "workers = 3"))) != identity
    by_groups = GOOD.replace("workers = 4\n", "").replace("global_batch_size = 24", "global_batch_size = 12")
    assert config_identity(load(by_groups)) != config_identity(load(by_groups.replace("groups = 3", "groups = 2")))
