"""Private names of tyro and torchtitan that this room uses. torchtitan is not imported for them.

The tests of this room fail if a release removes one.
"""

from typing import Any

from tyro import _errors as errors

__all__ = ["component_of", "errors", "is_component"]
"""`errors` has tyro's reasons to refuse a command line, as values, and `on_parse_error`, which makes tyro pass them to
a function instead of printing a panel."""


def is_component(config: Any) -> bool:
    """Return whether `config` is a torchtitan component's Config, or the class of one, and not a plain section."""
    return hasattr(config, "build")


def component_of(config: Any) -> type | None:
    """Return the class that a component's Config builds; None for a plain section and the Configs' base class."""
    return getattr(config, "_owner", None)
