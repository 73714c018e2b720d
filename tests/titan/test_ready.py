"""A group is ready before the others begin to wait for it."""

import contextlib
from types import SimpleNamespace

import pytest

from everstep.titan.trainer import EverstepTrainer


def test_a_group_computes_and_connects_before_it_announces_itself():
    """The order alone, of a trainer of which nothing else is there."""
    done = []

    class Trainer:
        device, step = SimpleNamespace(type="cpu"), 0
        place = SimpleNamespace(
            files=SimpleNamespace(beat=lambda *said: None), events=SimpleNamespace(emit=lambda *said, **more: None)
        )
        config = SimpleNamespace(
            fault_tolerance=SimpleNamespace(enable=True, group_id=0),
            compile=SimpleNamespace(enable=True),
            profiler=SimpleNamespace(build=lambda **more: contextlib.nullcontext()),
            dump_folder="",
        )
        metrics_processor = SimpleNamespace(ntokens_since_last_log=0, data_loading_times=[0.0])
        slots = SimpleNamespace(compute=lambda step, slot, whole: done.append("compute"))
        work = SimpleNamespace(discard=lambda: done.append("discard"))
        participation = SimpleNamespace(warm=lambda: done.append("warm"), run=lambda work: 1 / 0)
        _compile = EverstepTrainer._compile

    with pytest.raises(ZeroDivisionError):
        EverstepTrainer.train(Trainer())
    assert done == ["compute", "discard", "warm"]
