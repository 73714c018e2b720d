"""Faults that a worker makes itself when it is ordered to; `titan.worker_faults` is the other side.

An order is a file in the run directory, so it reaches workers on any host. Workers look for orders only if their run
was started with `fault_tolerance.allow_faults`. An order that nobody took by its deadline is void, and what lasts is
ended by the worker itself, so nothing here has to be undone.
"""

import random
import time
from dataclasses import dataclass
from signal import SIGKILL
from typing import ClassVar

from everstep.chaos.fault import Fault, Injection
from everstep.chaos.target import Target
from everstep.chaos.view import View
from everstep.run.files import order_file, write_json

TAKE_WITHIN_S = 60.0
NOT_ALLOWED = "the run takes no orders: start it with --fault_tolerance.allow_faults (never a run whose result matters)"


@dataclass(kw_only=True)
class Ordered(Fault):
    """Done by rank 0 of a group to itself."""

    at: ClassVar[str] = ""
    """The trainer's phase in which it happens; "": at once."""
    kills_first: ClassVar[bool] = False
    """Whether the group is killed now, and the order is for its next workers."""

    def never(self, run: View) -> str | None:
        return None if run.allows_faults else NOT_ALLOWED

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group = self.victim(target.run, choose)
        takers = self.takers(target.run, group)
        workers = target.run.workers(group) if self.kills_first else []

        def strike() -> None:
            now = time.time()
            order = {"id": f"{self.name}-{now:.6f}", "fault": self.name, "at": self.at, "deadline": now + TAKE_WITHIN_S}
            target.signal(workers, SIGKILL)  # first: the order is not for these
            for taker in takers:
                write_json(order_file(target.run_dir, taker), order | {"duration_s": self.duration_s})

        fields = {"at_phase": self.at} if self.at else {}
        return Injection(
            strike=strike, target_group=self.hit(group, takers), pids=[w.pid for w in workers], fields=fields
        )

    def takers(self, run: View, group: int) -> list[int]:
        """The groups that the order is for, when `group` is hit."""
        return [group]

    def hit(self, group: int, takers: list[int]) -> int | list[int]:
        """The groups that are hit for certain."""
        return group if takers == [group] else sorted((group, *takers))


class RaiseException(Ordered):
    name = "exception"
    breaks = "A rank raises a Python exception in the middle of a slot."
    undone = "An instant."
    expected = "As kill-worker; the traceback is in the group's logs."
    at = "compute"


class HangGil(Ordered):
    name = "hang-gil"
    breaks = "A rank hangs in C code that holds the interpreter's lock: not even its own threads run."
    undone = "Its agent kills it after stall_timeout_s."
    expected = "As hang: the agent sees that it no longer beats."


class MemoryHog(Ordered):
    name = "memory-hog"
    breaks = "A rank takes memory until the kernel kills it; at 2 GiB it ends itself as the kernel would."
    undone = "Its memory goes with it."
    expected = "As kill-worker."


@dataclass(kw_only=True)
class Straggler(Ordered):
    name = "straggler"
    breaks = "One group computes every slot half a second slower, for a while."
    undone = "By the worker, after duration_s."
    expected = "Steps wait for it; nothing is lost. Slots are shared out evenly, not by speed."

    duration_s: float = 6.0


class NanGradient(Ordered):
    name = "nan-gradient"
    breaks = "One element of a gradient of one group becomes NaN."
    undone = "An instant."
    expected = "The sum is not finite, so nobody commits; the group whose part is not finite computes its slots again."
    at = "compute"


class FlippedWeight(Ordered):
    name = "flipped-weight"
    breaks = "One bit of a parameter of one replica flips, between two steps."
    undone = "An instant."
    expected = (
        "The next audit (fault_tolerance.audit_interval) finds the replica that differs; it heals from the others."
    )
    at = "quorum"


class FlippedAttention(Ordered):
    name = "flipped-attention"
    breaks = "A high bit of one element of an attention result flips, in one slot of one group."
    undone = "An instant."
    expected = "The attention check corrects it, computes it again or refuses the slot."
    at = "compute"

    def never(self, run: View) -> str | None:
        checked = run.section("attention_check").get("enable", False)
        return super().never(run) or (None if checked else "the run does not check its attention (attention_check)")


@dataclass(kw_only=True)
class ClockJump(Ordered):
    name = "clock-jump"
    breaks = "The wall clock of one worker jumps ahead by an hour, for a while."
    undone = "By the worker, after duration_s."
    expected = "Nothing: waits and beats use the monotonic clock, and an event log the clock of its beginning."

    duration_s: float = 6.0


@dataclass(kw_only=True)
class Partition(Ordered):
    name = "partition"
    breaks = "All that arrives at one group's rank by TCP is dropped for a while, by a filter on each of its sockets."
    undone = "By the worker, after duration_s."
    expected = "The others go on without it once their waits time out; it comes back and heals."

    duration_s: float = 6.0


@dataclass(kw_only=True)
class LossyNetwork(Ordered):
    name = "lossy-network"
    breaks = "A tenth of the packets to one group's rank is dropped for a while; sending them again delays the rest."
    undone = "By the worker, after duration_s."
    expected = "Steps get slower; a group that is too slow for the timeouts is left out and comes back."

    duration_s: float = 6.0


class CorruptHeal(Ordered):
    name = "kill-and-corrupt-heal"
    breaks = "A group is killed, and a bit of the state that its next workers receive flips on the way."
    undone = "An instant."
    expected = "The checksum does not match, nothing of it is used, the next attempt heals."
    kills_first = True


class KillDuringHeal(Ordered):
    name = "kill-during-heal"
    breaks = "A group is killed, and its next workers again while they receive their state."
    undone = "An instant."
    expected = "As kill-group, twice."
    at = "heal"
    kills_first = True


class KillHealSource(Ordered):
    name = "kill-heal-source"
    breaks = "A group is killed, and the group that its next workers heal from while it sends them its state."
    undone = "An instant."
    expected = "Nothing of the half state is used; both heal from a group that is left, which finishes the step."
    kills_first = True

    def why_not(self, run: View) -> str | None:
        if (why := self.why_no_group(run, 2)) is not None:
            return why
        joiners = self._joiners(run)
        if not joiners or (self.group is not None and self.group not in joiners):
            return "the group that would be healed from is spared"
        return None

    def victim(self, run: View, choose: random.Random) -> int:
        return choose.choice(self._joiners(run)) if self.group is None else self.group

    def takers(self, run: View, group: int) -> list[int]:
        # torchft heals the first that is behind from the first that is not, in the order of group ids.
        return [min(run.taking_part - {group})]

    def _joiners(self, run: View) -> list[int]:
        allowed = run.candidates(2)
        return [group for group in allowed if self.takers(run, group)[0] in allowed]


class KillDuringConnect(Ordered):
    name = "kill-during-connect"
    breaks = "A group is killed, and its next workers while the new quorum's process group is built."
    undone = "An instant."
    expected = "The others build another one without it."
    at = "connect"
    kills_first = True


class KillDuringSum(Ordered):
    name = "kill-during-sum"
    breaks = "A worker is killed when its next sum over the groups has begun."
    undone = "An instant."
    expected = "As kill-worker; nobody has that sum, and the others make another one of what they hold."


class KillDuringSnapshot(Ordered):
    name = "kill-during-snapshot"
    breaks = "A worker is killed while it publishes a snapshot, between payload and header."
    undone = "An instant."
    expected = "As kill-worker; the torn snapshot is never believed."

    def never(self, run: View) -> str | None:
        return super().never(run) or (None if run.takes_snapshots else "the run takes no snapshots (snapshot.enable)")


class KillDuringCheckpoint(Ordered):
    name = "kill-during-checkpoint"
    breaks = "The worker that writes the next checkpoint on disk is killed when it has begun."
    undone = "An instant."
    expected = "As kill-worker; the checkpoint before stays the newest, another group writes the next."
    at = "checkpoint"

    def never(self, run: View) -> str | None:
        saves = run.section("checkpoint").get("enable", False)
        return super().never(run) or (None if saves else "the run writes no checkpoints (checkpoint.enable)")

    def victim(self, run: View, choose: random.Random) -> int:
        # Whoever has the first slots writes it: usually the lowest group that takes part.
        return min(run.candidates()) if self.group is None else self.group


KINDS: tuple[type[Fault], ...] = (
    RaiseException,
    HangGil,
    MemoryHog,
    Straggler,
    NanGradient,
    FlippedWeight,
    FlippedAttention,
    ClockJump,
    Partition,
    LossyNetwork,
    CorruptHeal,
    KillDuringHeal,
    KillHealSource,
    KillDuringConnect,
    KillDuringSum,
    KillDuringSnapshot,
    KillDuringCheckpoint,
)
