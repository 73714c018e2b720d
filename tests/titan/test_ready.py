"""A group is ready before the others begin to wait for it."""

from unittest.mock import MagicMock

import pytest
from torchtitan.components.validate import Validator

from everstep.attention.injection import Injector
from everstep.attention.section import Inject
from everstep.titan.trainer import EverstepTrainer
from watched import Watched, write_config

REDUCE_S = 3.0
"""Seconds; much less than compiling takes."""


def test_a_group_computes_and_connects_before_it_announces_itself():
    """The short form: only the order of the calls, on a trainer that is a mock otherwise."""
    done, injector = [], Injector(Inject(kind="nan"))
    injector.register(0, ("context",))

    def compute(step, slot, check_all):
        done.append("compute")
        injector.begin(step)
        assert injector.fault_for(0, "context") is not None

    trainer = MagicMock(step=0)
    trainer.device.type, trainer.checks.injector, trainer.slots.compute = "cpu", injector, compute
    trainer.work.discard = lambda: done.append("discard")
    trainer.participation.configure_mock(warm=lambda: done.append("warm"), run=lambda work: 1 / 0)
    trainer.validator.config = validation = Validator.Config(steps=7)
    trainer.validator.validate = lambda *_: done.append(f"validate {trainer.validator.config.steps} of 7")
    trainer._compile = lambda: EverstepTrainer._compile(trainer)
    trainer._validate_a_batch = lambda: EverstepTrainer._validate_a_batch(trainer)
    with pytest.raises(ZeroDivisionError):
        EverstepTrainer.train(trainer)
    assert done == ["compute", "validate 1 of 7", "discard", "warm"]
    assert trainer.validator.config is validation
    compute(1, 0, check_all=False)  # the fault of the first step was not used up


@pytest.mark.slow
def test_a_group_that_compiles_holds_nobody_up(tmp_path):
    """With a cold compiler cache. The killed group asks for a quorum only when it has compiled."""
    waits = {"reduce_timeout_s": REDUCE_S, "connect_timeout_s": REDUCE_S - 1.0, "join_timeout_s": REDUCE_S}
    config = write_config(
        tmp_path / "run.toml", job={"module": "tiny_llama", "config": "cold"},
        training={"steps": 100_000, "seq_len": 32, "global_batch_size": 4}, compile={"enable": True},
        fault_tolerance={"groups": 2, "quorum_timeout_s": 15.0, "stall_timeout_s": 120.0, **waits},
        checkpoint={"enable": False},
    )  # fmt: skip
    run = Watched(config, tmp_path / "run")
    try:
        run.wait_for_step((0, 1), after=0.0)
        killed = run.kill(1)
        healed = run.wait_for("heal", after=killed, group=1)
        run.until(lambda: len(run.events("commit", healed["t"], group=1)) >= 5, "five steps of both")
        told = run.events("compiled", killed, group=1)
        assert told[0]["took_s"] > REDUCE_S, "else this shows nothing"
        assert not [event for event in run.events("attempt", told[0]["t"], group=0) if not event["committed"]]
        begun = told[0]["t"] - told[0]["took_s"]
        meanwhile = [event for event in run.events("commit", begun, group=0) if event["t"] < told[0]["t"]]
        # If group 0 waited for group 1, it would commit nothing until that has compiled.
        assert len(meanwhile) > told[0]["took_s"] / REDUCE_S
    finally:
        run.end()
