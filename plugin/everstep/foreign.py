"""Ways to rely on private names of other packages that a renaming cannot turn into nothing.

Which names those are stands in `private.py` of the room that uses them, and a test of that room says which of them a
release has taken away.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def replace(owner: Any, name: str, value: Any) -> None:
    """Set a private name of another package's. Raises AttributeError where it is gone: nothing would be replaced."""
    if not hasattr(owner, name):
        called = getattr(owner, "__name__", None) or type(owner).__name__
        raise AttributeError(f"{called} has no {name} any more: this version of it is not supported")
    setattr(owner, name, value)


def overrides(base: type) -> Callable[[Method], Method]:
    """For a method that stands in for a private one of `base`. Raises AttributeError where that is gone: nobody would
    call it."""

    def check(method: Method) -> Method:
        if not callable(getattr(base, method.__name__, None)):
            raise AttributeError(
                f"{base.__name__} has no {method.__name__} any more: this version of it is not supported"
            )
        return method

    return check
