"""How a fault ends, in a form that outlives the process that caused it.

What is written down is read again by another process, and files can be written by others: an undo is one of UNDOS with
arguments that its function checks by type, and does nothing that would be worth planting.
"""

import importlib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from everstep.run.typed import Within

UNDOS = {
    "continue": "everstep.chaos.signals",
    "continue-on-nodes": "everstep.chaos.cluster",
    "remove-filler": "everstep.chaos.storage",
    "start-again": "everstep.chaos.launcher",
}
"""By name, the module whose `undo(args)` does it."""

Pid = Annotated[int, Within(2, 1 << 31)]
"""Of one process: not init, and none of the numbers below 1 that mean many."""
Known = tuple[Pid, float]
"""A pid, and the wall time at which the run had that process."""


@dataclass(frozen=True)
class Undo:
    """How a fault is undone, written down so that another process can do it when the injector is gone.

    It must do no harm when done twice, or when what it undoes has ended by itself.
    """

    do: Literal["continue", "continue-on-nodes", "remove-filler", "start-again"]
    args: dict[str, Any] = field(default_factory=dict)
    """Plain JSON."""

    def __call__(self) -> None:
        """Raises UnfitError when the arguments are none of this undo's."""
        importlib.import_module(UNDOS[self.do]).undo(self.args)

    @property
    def for_a_journal(self) -> "Undo":
        """What of it may stand in a file. A command and its environment may not: whoever could write the file could
        have it run, and whoever could read it could read keys."""
        return Undo(self.do) if self.do == "start-again" else self
