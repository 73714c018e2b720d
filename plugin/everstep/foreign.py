"""Replacing private names of other packages so that a renamed one raises an error and is not silently ignored.

Each room lists the private names that it uses in its `private.py`. A test of the room reports which of them a release
has removed.
"""

from typing import Any


def replace(owner: Any, name: str, value: Any) -> None:
    """Set the private attribute `name` of another package's object. Raises AttributeError if there is no such name."""
    if not hasattr(owner, name):
        called = getattr(owner, "__name__", None) or type(owner).__name__
        raise AttributeError(f"{called} has no {name} any more: this version of it is not supported")
    setattr(owner, name, value)
