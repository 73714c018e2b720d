"""A worker that breaks itself when it is ordered to (`chaos.orders`), for runs with `fault_tolerance.allow_faults`.

Nothing of the trainer knows this file but the line that starts it: the faults are put around its parts from outside.
"""

import threading
import time
from pathlib import Path
from typing import Any

import torch

from everstep.run.files import order_file, read_json
from everstep.step.reduction import local

POLL_S = 0.05
STRAGGLE_S = 0.5


class WorkerFaults:
    """Looks for orders to one rank and carries them out."""

    def __init__(self, trainer: Any, run_dir: Path, group: int, rank: int) -> None:
        self.trainer = trainer
        self.file = order_file(run_dir, group, rank)
        self._slow_until = 0.0
        self._nan_due = False
        self._compute = trainer.work.compute
        trainer.work.compute = self.compute
        self.file.unlink(missing_ok=True)  # an order was for the workers that ran when it was given
        threading.Thread(target=self._look, name="worker-faults", daemon=True).start()

    def _look(self) -> None:
        while True:
            if order := read_json(self.file):
                self.file.unlink(missing_ok=True)
                self.take(order)
            time.sleep(POLL_S)

    def take(self, order: dict[str, Any]) -> None:
        """Carry an order out: begin what lasts, or note what is due with the next slot."""
        if order["fault"] == "straggler":
            self._slow_until = time.monotonic() + order["duration_s"]
        elif order["fault"] == "nan-gradient":
            self._nan_due = True

    def compute(self, step: int, slot: int, *, whole: bool) -> None:
        """The `compute` of the trainer's work, with the faults that are due."""
        if time.monotonic() < self._slow_until:
            time.sleep(STRAGGLE_S)
        due, self._nan_due = self._nan_due, False
        self._compute(step, slot, whole=whole)
        if due:
            hit = next(p for p in self.trainer.model_parts[0].parameters() if p.requires_grad)
            if hit.grad is None:  # taken already
                hit.grad = torch.zeros_like(hit)
            local(hit.grad).view(-1)[0] = float("nan")
