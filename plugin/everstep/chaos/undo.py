"""How a fault ends, in a form that outlives the process that caused it."""

import importlib
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Undo:
    """How a fault is undone, written down so that another process can do it when the injector is gone.

    It must do no harm when done twice, or when what it undoes has ended by itself.
    """

    do: str
    """`module:function`, called with `args`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Plain JSON."""

    def __call__(self) -> None:
        module, _, name = self.do.partition(":")
        getattr(importlib.import_module(module), name)(**self.args)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
