"""Private names of tyro and torchtitan that this room relies on, neither of which is imported for the other's sake.

The tests of this room fail if a release takes one away.
"""

from typing import Any

from tyro import _errors as errors

__all__ = ["component_of", "errors", "is_component"]
"""`errors`: why tyro refuses a command line, as values, and `on_parse_error`, by which it tells them instead of
printing a panel."""


def is_component(config: Any) -> bool:
    """Whether this is the Config of a torchtitan component, or one's class, and no plain section."""
    return hasattr(config, "build")


def component_of(config: Any) -> type | None:
    """The class that a torchtitan component's Config builds; None for the Config that all have in common."""
    return config._owner
