"""Real semi-synchronous runs of a tiny Llama on the CPU."""

import pytest
from run.conftest import start as start

from everstep.titan.data.byte_tokenizer import ByteTokenizer
from everstep.titan.data.rows import Rows
from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer
from reference import simulate


class Streams:
    """Batches by slot. Each slot is a data-parallel rank of torchtitan's own dataloader, read in order."""

    def __init__(self, loader, slots, shape):
        self._loaders = [iter(loader.build(dp_world_size=slots, dp_rank=slot, **shape)) for slot in range(slots)]

    def microbatch(self, step, slot):
        return next(self._loaders[slot])


@pytest.fixture(scope="session")
def reference():
    """A function that returns the result of the papers' formulas for a config of `semi_config`."""
    known = {}

    def _reference(path):
        text = path.read_text()
        if text not in known:
            config = load_config(path, EverstepTrainer.Config)
            slots = config.training.global_batch_size
            shape = {"seq_len": 32, "local_batch_size": 1, "tokenizer": ByteTokenizer.Config().build()}
            if config.data.source == "dataloader":
                data = Streams(config.dataloader, slots, shape)
            else:
                data = Rows.Config(shuffle=True, seed=0).build(dp_world_size=1, dp_rank=0, **shape)
                data.open_slots(slots)
            known[text] = simulate(config, data)
        return known[text]

    return _reference
