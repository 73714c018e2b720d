"""Asks for a group's next quorum: rank 0 asks the lighthouse and tells the other ranks of the group."""

from typing import NamedTuple

from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.request import Quorum, Request, State, decode, differing_settings, encode, read_quorum
from everstep.step.attempt import Group, Host, Outcome, Rules
from everstep.step.decisions import Decisions


class Answer(NamedTuple):
    """What rank 0 tells the others: `ending` (see `Asker.ending`); the reason why there is no quorum, empty if there is
    one; the quorum's id and encoded members (`request.encode`)."""

    ending: str
    reason: str
    id: int
    members: list[str]


class Asker:
    """Asks for quorums, as one rank of a group."""

    def __init__(self, group: Group, decisions: Decisions, host: Host, rules: Rules) -> None:
        self._group, self._decisions, self._host = group, decisions, host
        self._rules, self._finished_before = rules, host.files.finished_step()
        self._met: tuple[Request, ...] = ()
        """Requests of all groups that asked for the last quorum."""
        self._makers: tuple[Request, ...] = ()
        """Requests of those groups that make the last quorum's steps."""
        self._left_out: tuple[int, ...] = ()
        self._asked = 0
        self._waited_s = 0.0
        """Seconds for which it has asked, since its last quorum."""

    def ask(self, state: State, follows: State, *, finishing: bool, connected: str) -> Quorum | Outcome | None:
        """Return the next quorum, the same on all ranks of the group; None if there is none now; FENCED or TOO_LATE if
        this start of the group must not go on. Takes decisions of the group. For the arguments, see `Request`."""
        self._asked = 1 + max(self._asked, *(member.number for member in self._met), 0)
        begun, group, missing = self._host.clock.now(), self._group, self._group.sums.reachability.unreachable()
        unreached = [member.name for member in self._met if not missing.isdisjoint(member.watches)]
        died = group.sums.watch.died
        said = self._decisions.gather("ask", [group.state_server.address, group.sums.address, unreached])
        request = Request(
            group=group.id,
            life=group.life,
            number=self._asked,
            state=state,
            follows=follows,
            finishing=finishing,
            connected=connected,
            store=group.store,
            state_addresses=tuple(address for address, _, _ in said),
            watches=tuple(watch for _, watch, _ in said),
            unreached=tuple(sorted({name for _, _, names in said for name in names})),
            makers=sum(died.isdisjoint(member.watches) for member in self._makers),
            settings=(f"ranks = {len(said)}", *self._rules.settings),
        )
        answer = Answer(*self._decisions.gather("quorum", self._ask_lighthouse(request))[0])
        step, events = state.step + 1, self._host.events
        self._waited_s += self._host.clock.now() - begun
        if answer.reason:
            events.emit("quorum_failed", step, reason=answer.reason, waited_s=round(self._waited_s, 3))
        if answer.ending:
            return Outcome[answer.ending]
        if answer.reason:
            return None
        self._waited_s = 0.0
        self._met = tuple(map(decode, answer.members))
        quorum = read_quorum(answer.id, self._met)
        self._makers = tuple(map(quorum.member, quorum.able))
        self._tell_left_out(quorum)
        return quorum

    def _ask_lighthouse(self, request: Request) -> Answer | None:
        """Ask the lighthouse and return the answer; None on other ranks than rank 0."""
        membership = self._group.membership
        if membership is None:
            return None
        quorum_id, members, reason = 0, list[str](), ""
        try:
            quorum_id, found = membership.ask(request, self._rules.timeouts.quorum)
            members = [encode(member) for member in found]
        except QuorumUnavailable as error:
            reason = str(error)
        # Checked again: the run may have ended while another rank of this group stood still.
        return Answer(self.ending(request.state.step), reason, quorum_id, members)

    def ending(self, step: int) -> str:
        """Return the name of the outcome that ends this start of the group, which has the state after `step`; empty if
        it goes on. Only rank 0 decides; the other ranks return an empty name.

        TOO_LATE: the other groups ended the run with a later state while this group was busy. If they ended only
        because they were asked to leave, that holds only for a group that was asked to leave as well.
        """
        files = self._host.files
        if self._decisions.rank:
            return ""
        if files.fenced():
            return Outcome.FENCED.name
        finished = files.finished_step()
        if finished == self._finished_before or step >= finished:
            return ""
        return Outcome.TOO_LATE.name if files.asked_to_leave() or files.ended_for_all() else ""

    def _tell_left_out(self, quorum: Quorum) -> None:
        """Emit an event if other groups are left out than before, on rank 0 of the first group that is not."""
        if quorum.left_out != self._left_out and (self._group.id, self._decisions.rank) == (quorum.groups[0], 0):
            told = {"groups": list(quorum.left_out), "cut": [list(pair) for pair in quorum.cut]}
            self._host.events.emit("left_out", quorum.state.step + 1, **told, reason=differing_settings(self._met))
        self._left_out = quorum.left_out
