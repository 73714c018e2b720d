"""Ways to rely on private names of other packages that a renaming cannot turn into nothing.

Which names those are stands in `private.py` of the room that uses them, and a test of that room says which of them a
release has taken away.
"""

from typing import Any


def replace(owner: Any, name: str, value: Any) -> None:
    """Set a private name of another package's. Raises AttributeError where it is gone: nothing would be replaced."""
    if not hasattr(owner, name):
        called = getattr(owner, "__name__", None) or type(owner).__name__
        raise AttributeError(f"{called} has no {name} any more: this version of it is not supported")
    setattr(owner, name, value)
