"""Runs a group's steps from the start of its workers to the end of the run.

The driver applies commits. If no group has a state, it restores one, or waits for a group that may come back with one.
At the end of the run one group writes the last checkpoint, and the others wait until it is there. Each of these is a
decision of the whole group.
"""

from datetime import timedelta

from everstep.quorum.request import NO_STATE, Quorum
from everstep.step.attempt import Host, Outcome
from everstep.step.interfaces import Commit, Work
from everstep.step.protocol import StepProtocol

STATE_POLL_S, SAVE_AGAIN_S = 1.0, 5.0
"""Seconds between two checks whether a group that has a state is back, and between two tries of the last checkpoint."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 1.0
"""Seconds before a retry, doubled with each retry in a row. Without this backoff, what fails at once every time, such
as a backend that does not know the device, is tried fifty times a second, and what each try leaves behind adds up."""


class Driver:
    """Runs a group's steps, as one of its ranks. `give_up`: longest wait for other groups at the end of the run."""

    def __init__(self, protocol: StepProtocol, work: Work, host: Host, give_up: timedelta) -> None:
        self._protocol, self._work, self._give_up = protocol, work, give_up
        self._clock, self._files, self._events = host.clock, host.files, host.events
        self._decisions = protocol.decisions

    def run(self) -> Outcome:
        """Make steps until the run is over or this group leaves; return OVER, TOO_LATE, LEFT or FENCED.

        Raises:
            GroupBroken, GaveUp: this group has to restart.
            TimeoutError: the other groups neither finished the last step nor left.
        """
        outcome: Commit | Outcome | Quorum | None = None
        pause_s = SHORTEST_PAUSE_S
        while self._work.goes_on():
            outcome = self._protocol.attempt()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if outcome is Outcome.RETRY else SHORTEST_PAUSE_S
            match outcome:
                case Commit():
                    self._protocol.apply(outcome)
                    if outcome.all_leave:
                        break
                    if self._protocol.leaving:
                        return Outcome.LEFT
                case Outcome.FOLLOWED:
                    if self._protocol.leaving:
                        return Outcome.LEFT
                case Quorum():
                    if end := self._find_state(outcome):
                        return end
                case Outcome.LEFT | Outcome.FENCED | Outcome.TOO_LATE:
                    return outcome
                case Outcome.OUT_OF_DATA | Outcome.OVER:
                    break
                case Outcome.RETRY:
                    self._clock.sleep(pause_s)
        unsaved = self._decisions.all_true("unsaved", self._protocol.state.step > self._files.finished_step())
        met = outcome is Outcome.OVER
        return self._finish(met) if unsaved or met else Outcome.OVER

    def _find_state(self, quorum: Quorum) -> Outcome | None:
        """Restore a state, as no group of the quorum has one. If a group outside of it may have one, wait instead: it
        hangs or is busy, its watchdog decides about it, and restoring now would undo its steps. Return an outcome if
        this group's run ends here."""
        others = sorted(self._files.groups_with_state())
        said = self._decisions.gather("blank", [self._files.is_over(), not others])
        if all(over for over, _ in said):
            return Outcome.OVER
        if self._protocol.leaving:
            return Outcome.LEFT
        if all(alone for _, alone in said):
            self._files.beat("restore", NO_STATE)
            self._protocol.restored(*self._work.restore(quorum))
        else:
            self._events.emit("waiting_for_state", groups=others)
            self._clock.sleep(STATE_POLL_S)
        return None

    def _finish(self, met: bool) -> Outcome:
        """Return once the state after the last step is saved, by this group or another.

        The groups keep asking for quorums. The first group of a quorum that has the newest state saves it. If it dies
        meanwhile, the next quorum lacks it and another group saves. If it cannot write, it dies too, but the last group
        that has the state tries again until it can. A marker in the run directory tells that the state of a step is
        saved, so a group that comes too late does not start the run over. A group that was in a quorum with a group
        that saves asks once more, because that group asks again and would wait for it.

        Args:
            met: whether this group was in a quorum with a group that has made the last step.
        """
        step, begun = self._protocol.state.step, self._clock.now()
        while True:
            in_time = self._clock.now() - begun < self._give_up.total_seconds()
            if not self._decisions.all_true("finish", in_time):
                raise TimeoutError(f"the other groups neither finished step {step} nor left within {self._give_up}")
            self._files.beat("finish", step)
            quorum = self._protocol.ask_quorum(finishing=True)
            if isinstance(quorum, Outcome):
                return quorum
            # If another group writes the marker just now, one rank may see it and another one not.
            saved = self._decisions.all_true("finished", self._files.finished_step() >= step)
            if saved and (met or quorum is None):
                return Outcome.OVER
            if quorum is None:
                continue
            if self._protocol.group not in quorum.able:
                return Outcome.OVER  # other groups have a newer state and save that
            met = True
            if quorum.able[0] == self._protocol.group and not saved:
                try:
                    self._work.save_last()
                except OSError as error:  # on all ranks of the group
                    if len(quorum.able) > 1:
                        raise
                    self._events.emit("checkpoint_failed", step, reason=str(error))
                    self._clock.sleep(SAVE_AGAIN_S)
                    begun = self._clock.now()
                    continue
                some_leave = self._protocol.leaving and self._work.goes_on()
                self._files.mark_finished(step, for_all=not some_leave)
