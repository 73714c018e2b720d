"""The private names of tyro and torchtitan that the room relies on are there."""

import inspect

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import Configurable

from everstep.config import private
from everstep.config.sections import Data


def test_tyro_says_why_it_refuses_as_values():
    for name in ("MissingArgs", "UnrecognizedArgs", "InvalidChoice", "BadValue", "InstantiationFailure"):
        assert issubclass(getattr(private.errors, name), object), name
    assert len(inspect.signature(private.errors.on_parse_error).parameters) == 1


def test_a_component_is_known_by_its_config_and_a_section_is_none():
    assert private.is_component(CheckpointManager.Config())
    assert private.component_of(CheckpointManager.Config()) is CheckpointManager
    assert private.component_of(Configurable.Config) is None
    assert not private.is_component(Data())
