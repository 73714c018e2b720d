"""What one rank of a group reads and writes in the run directory, besides its events."""

import os
import signal
from pathlib import Path
from typing import Any

from everstep.run import fence, typed
from everstep.run.beats import DONE, STARTUP, BeatFile, beat_path, beats_of_groups
from everstep.run.directory import ended_file, finished_file, finished_step, stop_file
from everstep.run.files import lock_for_life, read_json, write_first, write_json

AWAY = (DONE, STARTUP)
"""Phases of a beat in which a group has no state to offer."""


def differences(path: Path, mine: dict[str, str]) -> str:
    """Return in words how `mine` differs from the properties that the run's first start wrote to a file; "" if they are
    equal. If there is no such file, this is the first start, which writes it."""
    write_first(path, typed.dumps(mine))
    first, unset = read_json(path), "not set"
    differing = sorted(key for key in first.keys() | mine.keys() if first.get(key) != mine.get(key))
    return "; ".join(f"{key} is {mine.get(key, unset)} here and {first.get(key, unset)} there" for key in differing)


class RankFiles:
    """Implements `everstep.step.interfaces.RunFiles`; see there for methods without a docstring. Installs a SIGTERM
    handler, which asks this rank to leave.

    Args:
        run_dir, group, rank: of this rank.
        steps: number of commits of the whole run.
        stall_timeout_s: seconds after which a group that has not beaten is taken to have no state to offer.
    """

    def __init__(self, run_dir: Path, group: int, rank: int, *, steps: int, stall_timeout_s: float) -> None:
        self._run_dir, self._group, self._steps, self._stall_timeout_s = run_dir, group, steps, stall_timeout_s
        self._rank = rank
        lock_for_life(fence.rank_lock(run_dir, group, rank))  # `everstep.launch.worker` has done so, but not torchrun
        self._heartbeat = BeatFile(beat_path(run_dir, group, rank))
        claim = os.environ.get(fence.ENVIRONMENT)
        self._claim = fence.Claim.parse(claim) if claim else None
        self._terminated = False
        self._finished_before = self.finished_step()
        signal.signal(signal.SIGTERM, self._on_terminate)

    def _on_terminate(self, signum: int, frame: Any) -> None:
        self._terminated = True

    def beat(self, phase: str, step: int, slot: int = -1) -> None:
        """See `RunFiles.beat`. If this process dies while it computes `slot`, the slot's data may be the cause."""
        self._heartbeat.beat(phase, step, slot)

    def fenced(self) -> bool:
        return self._claim is not None and not fence.holds(self._run_dir, self._group, self._claim)

    def asked_to_leave(self) -> bool:
        """See `RunFiles.asked_to_leave`. Rank 0 also looks for the stop file: a signal can be missed."""
        return self._terminated or (self._rank == 0 and os.path.exists(stop_file(self._run_dir)))

    def groups_with_state(self) -> list[int]:
        return [
            group
            for group, beat, age_s in beats_of_groups(self._run_dir)
            if group != self._group and beat.step > 0 and beat.phase not in AWAY and age_s < self._stall_timeout_s
        ]

    def finished_step(self) -> int:
        return finished_step(self._run_dir)

    def ended_for_all(self) -> bool:
        return read_json(finished_file(self._run_dir)).get("for_all") is True

    def mark_finished(self, step: int, *, for_all: bool) -> None:
        """Record that the state after `step` is saved. `for_all`: not only because groups were asked to leave."""
        write_json(finished_file(self._run_dir), {"step": step, "for_all": for_all})

    def restored(self, step: int) -> None:
        """Note that the run goes on after `step`. If an earlier start ended at a later step, that state is lost, so
        lower the marker to `step`: the steps after it will be made and saved again."""
        if step < self.finished_step() == self._finished_before:
            self.mark_finished(step, for_all=False)

    def is_over(self) -> bool:
        return self.finished_step() >= self._steps

    def end_run(self, reason: str) -> None:
        """Record why the run cannot go on. Agents then stop their groups until a user starts the run again."""
        write_json(ended_file(self._run_dir), {"reason": reason})

    def why_run_ended(self) -> str:
        """Return why the run cannot go on, as a group (`end_run`) or an agent recorded; "" if it can."""
        return str(read_json(ended_file(self._run_dir)).get("reason", ""))
