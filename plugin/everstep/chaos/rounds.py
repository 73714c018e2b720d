"""Faults that hit semi-synchronous rounds where it matters: within one, where the state of a worker is, who took a
worker over. docs/semi-sync.md."""

import random

from everstep.chaos.fault import Fault, Injection
from everstep.chaos.hosts import KillHost
from everstep.chaos.orders import Ordered
from everstep.chaos.target import Target
from everstep.chaos.view import View
from everstep.semi.worker_files import files_by_round, files_within_rounds, folder_of

AGAIN = (
    "Another group computes the worker's round from its beginning, or with keep_steps from its newest state within "
    "it, the others wait for it; the curve stays as it is."
)


class OfRounds(Fault):
    """Of semi-synchronous runs alone."""

    def never(self, run: View) -> str | None:
        makes_none = run.section("semi_sync").get("method", "none") == "none"
        return super().never(run) or ("it makes no rounds (semi_sync)" if makes_none else None)


class KillMidRound(OfRounds, Ordered):
    name = "kill-mid-round"
    breaks = "A worker process is killed when it has made half of the optimizer steps of a round."
    undone = "An instant."
    expected = f"As kill-worker. {AGAIN}"
    at = "half-round"


class KillAdopter(OfRounds, Ordered):
    name = "kill-adopter"
    breaks = "A group is killed, and the first group that takes one of its workers over, within that worker's round."
    undone = "An instant."
    expected = "A third group takes the workers of both over; both come back and heal."
    at = "adopt"
    kills_first = True

    def why_not(self, run: View) -> str | None:
        return self.why_no_group(run, 2)

    def victim(self, run: View, choose: random.Random) -> int:
        return choose.choice(run.candidates(2)) if self.group is None else self.group

    def takers(self, run: View, group: int) -> list[int]:
        # Who adopts depends on what each holds when the group is found to be gone.
        return sorted(set(run.candidates(2)) - {group})

    def hit(self, group: int, takers: list[int]) -> int | list[int]:
        return group  # the adopter says itself that it dies


class KillHostAndStates(OfRounds, KillHost):
    name = "kill-host-and-states"
    breaks = (
        "As kill-host, and the newest states of its workers are lost with it, as if they had not reached the file "
        "server yet."
    )
    expected = f"Who takes the workers over makes their last round again, from the state before. {AGAIN}"

    def why_not(self, run: View) -> str | None:
        if (why := super().why_not(run)) is not None:
            return why
        if not self._carriers(run) or (self.group is not None and self.group not in self._carriers(run)):
            return "the group that would be hit carries no worker now"
        folder = folder_of(run.run_dir)
        if any(len(files_by_round(folder, worker)) < 2 for worker in range(len(run.owners))):
            return "not every worker has a state of an earlier round yet"
        return None

    def victim(self, run: View, choose: random.Random) -> int:
        return choose.choice(self._carriers(run)) if self.group is None else self.group

    def _carriers(self, run: View) -> list[int]:
        return [group for group in run.candidates() if group in run.owners]

    def plan(self, target: Target, choose: random.Random) -> Injection:
        injection, folder = super().plan(target, choose), folder_of(target.run_dir)
        workers = [worker for worker, owner in enumerate(target.run.owners) if owner == injection.target_group]
        kill = injection.strike

        def strike() -> None:
            kill()
            for worker in workers:
                written = files_by_round(folder, worker)
                for path in [*written[max(written)], *files_within_rounds(folder, worker)]:
                    path.unlink(missing_ok=True)

        injection.strike = strike
        injection.fields["of_workers"] = workers
        return injection


KINDS: tuple[type[Fault], ...] = (KillMidRound, KillAdopter, KillHostAndStates)
