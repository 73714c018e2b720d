"""Drives a group's steps from the start of its workers to their end.

Applies commits, brings a state where no group has one, waits for one that may come back, and ends the run: one group
writes the last checkpoint and the others stand by until it is there. All of it in decisions of the whole group.
"""

from datetime import timedelta

from everstep.quorum.request import NO_STATE, Quorum
from everstep.step.attempt import Host, Turn
from everstep.step.interfaces import Commit, Work
from everstep.step.protocol import StepProtocol

STATE_POLL_S = 1.0
"""Between two looks whether a group that has a state comes back."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 1.0
"""After a retry; each one in a row waits twice as long as the one before: what fails at once every time, such as a
backend that does not know the device, would be tried fifty times a second, and what each leaves behind adds up."""


class Driver:
    """Runs a group to its end.

    Args:
        protocol: makes the steps.
        work: the trainer.
        host: of this rank.
        give_up: longest wait for the other groups at the end of the run.
    """

    def __init__(self, protocol: StepProtocol, work: Work, host: Host, give_up: timedelta) -> None:
        self._protocol, self._work, self._give_up = protocol, work, give_up
        self._clock, self._files, self._events = host.clock, host.files, host.events
        self._decisions = protocol.decisions

    def run(self) -> Turn:
        """Steps until the run is over or this group leaves. Which it was: OVER, TOO_LATE, LEFT or FENCED.

        Raises:
            GroupBroken, GaveUp: this group has to start again.
            TimeoutError: the others neither finished the last step nor left.
        """
        turn: Commit | Turn | Quorum | None = None
        pause_s = SHORTEST_PAUSE_S
        while self._work.goes_on():
            turn = self._protocol.attempt()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if turn is Turn.RETRY else SHORTEST_PAUSE_S
            match turn:
                case Commit():
                    self._protocol.apply(turn)
                    if turn.all_leave:
                        break
                    if self._protocol.leaving:
                        return Turn.LEFT
                case Turn.FOLLOWED:
                    if self._protocol.leaving:
                        return Turn.LEFT
                case Quorum():
                    if end := self._find_state(turn):
                        return end
                case Turn.LEFT | Turn.FENCED | Turn.TOO_LATE:
                    return turn
                case Turn.OUT_OF_DATA | Turn.OVER:
                    break
                case Turn.RETRY:
                    self._clock.sleep(pause_s)
        unsaved = self._decisions.all_true("unsaved", self._protocol.state.step > self._files.finished_step())
        met = turn is Turn.OVER
        return self._finish(saved=not unsaved, met=met) if unsaved or met else Turn.OVER

    def _find_state(self, quorum: Quorum) -> Turn | None:
        """No group of the quorum has a state; but one that is in no quorum may: it hangs or is busy, and its watchdog
        decides. Going back to the disk now would undo its steps."""
        others = sorted(self._files.groups_with_state())
        said = self._decisions.gather("blank", [self._files.is_over(), not others])
        if all(over for over, _ in said):
            return Turn.OVER
        if self._protocol.leaving:
            return Turn.LEFT
        if all(alone for _, alone in said):
            self._files.beat("restore", NO_STATE)
            self._protocol.restored(*self._work.restore(quorum))
        else:
            self._events.emit("waiting_for_state", groups=others)
            self._clock.sleep(STATE_POLL_S)
        return None

    def _finish(self, *, saved: bool, met: bool) -> Turn:
        """Return once the state after the last step is saved, by this group or another.

        The groups keep meeting in quorums. The first of those that have the newest state writes; should it die in the
        middle, the next quorum lacks it and another one writes. A small marker in the run directory says that the
        state of a step is saved, so a group that comes too late does not start the run over. Whoever was in a quorum
        in which one was to write asks once more, since that one does and would wait for it.

        Args:
            saved: whether the marker is there.
            met: whether this group was in a quorum with one that has made the last step.
        """
        step, begun = self._protocol.state.step, self._clock.now()
        while True:
            in_time = self._clock.now() - begun < self._give_up.total_seconds()
            if not self._decisions.all_true("finish", in_time):
                raise TimeoutError(f"the other groups neither finished step {step} nor left within {self._give_up}")
            self._files.beat("finish", step)
            quorum = self._protocol.meet(finishing=True)
            if isinstance(quorum, Turn):
                return quorum
            # One rank may see the marker that another group writes just now, and another rank not yet.
            saved = self._decisions.all_true("finished", self._files.finished_step() >= step)
            if saved and (met or quorum is None):
                return Turn.OVER
            if quorum is None or not quorum.able:
                continue
            if self._protocol.group not in quorum.able:
                return Turn.OVER  # others went on, and have a newer state to save
            met = True
            if quorum.able[0] == self._protocol.group and not saved:
                self._files.beat("checkpoint", step)
                self._work.save_last()
                some_leave = self._protocol.leaving and self._work.goes_on()
                self._files.mark_finished(step, for_all=not some_leave)
                saved = True
