"""A user's own module for `[job] module`: torchtitan's debug Llama 3, whose forward ends the process in one slot."""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from everstep.titan.work import SlotTrainer

STEP, SLOT = 4, 2

_fetch = SlotTrainer._fetch


def _fetch_or_die(trainer, step, slot):
    if (step, slot) == (STEP, SLOT):
        raise RuntimeError("a token that no table has")
    return _fetch(trainer, step, slot)


SlotTrainer._fetch = _fetch_or_die


def debugmodel() -> Trainer.Config:
    return llama3_debugmodel()
