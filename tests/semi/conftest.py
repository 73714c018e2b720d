"""Real semi-synchronous runs of a tiny Llama on the CPU."""

import pytest

from everstep.titan.data.byte_tokenizer import ByteTokenizer
from everstep.titan.data.stdlib_text import StdlibText
from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer
from reference import simulate
from semi_runs import EPS, LR, ROUNDS, SLOTS, SYNC_STEPS, WARMUP, WORKERS, semi_config
from watched import Watched


@pytest.fixture
def start(tmp_path):
    """Starts `everstep run` on a config; ends with the test."""
    runs = []

    def _start(config, *args, name="run"):
        runs.append(Watched(config, tmp_path / name, *args))
        return runs[-1]

    yield _start
    for run in runs:
        run.end()


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """What the papers' formulas give for `semi_config`."""
    known = {}

    def _reference(method, rounds=ROUNDS, sync_steps=SYNC_STEPS):
        key = (method, rounds, sync_steps)
        if key not in known:
            path = semi_config(tmp_path_factory.mktemp("reference") / "run.toml")
            config = load_config(path, EverstepTrainer.Config)
            data = StdlibText.Config(shuffle=True, seed=0).build(
                dp_world_size=1, dp_rank=0, seq_len=32, local_batch_size=1, tokenizer=ByteTokenizer.Config().build()
            )
            data.open_slots(SLOTS, 0, 1)
            known[key] = simulate(
                config,
                data,
                method=method,
                workers=WORKERS,
                sync_steps=sync_steps,
                rounds=rounds,
                slots=SLOTS,
                warmup=WARMUP,
                lr=LR,
                eps=EPS,
            )
        return known[key]

    return _reference
