"""Faults that a worker makes itself when it is ordered to; `titan.worker_faults` is the other side.

An order is a file in the run directory, so it reaches workers on any host. Workers look for orders only if their run
was started with `fault_tolerance.allow_faults`. An order is for the workers that run when it is given; later ones
delete it. What lasts is ended by the worker itself.
"""

import random
import secrets
from dataclasses import dataclass

from everstep.chaos.fault import Fault, Injection
from everstep.chaos.target import Target
from everstep.chaos.view import View
from everstep.run.files import order_file, write_json

NOT_ALLOWED = "the run takes no orders: start it with --fault_tolerance.allow_faults (never a run whose result matters)"


@dataclass(kw_only=True)
class Ordered(Fault):
    """Done by rank 0 of a group to itself."""

    def never(self, run: View) -> str | None:
        return None if run.allows_faults else NOT_ALLOWED

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group = self.victim(target.run, choose)
        order = {"id": f"{self.name}-{secrets.token_hex(4)}", "fault": self.name, "duration_s": self.duration_s}
        return Injection(
            strike=lambda: write_json(order_file(target.run_dir, group), order),
            target_group=group,
        )


@dataclass(kw_only=True)
class Straggler(Ordered):
    name = "straggler"
    breaks = "One group computes every slot half a second slower, for a while."

    duration_s: float = 6.0


class NanGradient(Ordered):
    name = "nan-gradient"
    breaks = "One element of a gradient of one group becomes NaN."
