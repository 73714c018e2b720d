"""How a group asks for its next quorum: rank 0 asks the lighthouse, and all ranks learn the same from it."""

from typing import NamedTuple

from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.request import Quorum, Request, State, decode, differing_settings, encode, read_quorum
from everstep.step.attempt import Group, Host, Rules, Turn
from everstep.step.decisions import Decisions


class Answer(NamedTuple):
    """What rank 0 tells the others: see `Asker.over`; why there is no quorum, empty if there is one; its id and members
    (`request.encode`)."""

    over: str
    reason: str
    id: int
    members: list[str]


class Asker:
    """One rank's part in it.

    Args:
        group: this rank's.
        decisions: of the group.
        host: of this rank.
        rules: of the run.
    """

    def __init__(self, group: Group, decisions: Decisions, host: Host, rules: Rules) -> None:
        self._group, self._decisions, self._host = group, decisions, host
        self._rules, self._finished_before = rules, host.files.finished_step()
        self._met: tuple[Request, ...] = ()
        """All that asked for the last quorum."""
        self._makers: tuple[Request, ...] = ()
        """Those that make its steps."""
        self._left_out: tuple[int, ...] = ()
        self._asked = 0

    def ask(self, state: State, follows: State, *, finishing: bool, connected: str) -> Quorum | Turn | None:
        """The next quorum, the same on all ranks of the group; None when there is none now; FENCED or TOO_LATE if this
        start of the group is not to go on. Decisions of the group.

        Args:
            state, follows: what the group has, and what it will have once it has caught up.
            finishing: see `Request`.
            connected: key of the quorum whose process group it is connected in; empty for none.
        """
        self._asked += 1
        begun, group, missing = self._host.clock.now(), self._group, self._group.sums.reach.missing()
        unreached = [member.name for member in self._met if not missing.isdisjoint(member.watches)]
        ended = group.sums.watch.ended
        said = self._decisions.gather("ask", [group.door.address, group.sums.address, unreached])
        request = Request(
            group=group.id,
            life=group.life,
            number=self._asked,
            state=state,
            follows=follows,
            finishing=finishing,
            connected=connected,
            store=group.store,
            doors=tuple(door for door, _, _ in said),
            watches=tuple(watch for _, watch, _ in said),
            unreached=tuple(sorted({name for _, _, names in said for name in names})),
            makers=sum(ended.isdisjoint(member.watches) for member in self._makers),
            settings=(f"ranks = {len(said)}", *self._rules.settings),
        )
        answer = Answer(*self._decisions.first("quorum", self._ask_lighthouse(request)))
        step, events = state.step + 1, self._host.events
        if answer.reason:
            waited_s = round(self._host.clock.now() - begun, 3)
            events.emit("quorum_failed", step, reason=answer.reason, waited_s=waited_s)
        if answer.over:
            return Turn[answer.over]
        if answer.reason:
            return None
        self._met = tuple(map(decode, answer.members))
        quorum = read_quorum(answer.id, self._met)
        self._makers = tuple(map(quorum.member, quorum.able))
        self._tell_left_out(quorum)
        return quorum

    def _ask_lighthouse(self, request: Request) -> Answer | None:
        """Rank 0's question and its answer."""
        membership = self._group.membership
        if membership is None:
            return None
        quorum_id, members, reason = 0, list[str](), ""
        try:
            quorum_id, found = membership.ask(request, self._rules.timeouts.quorum)
            members = [encode(member) for member in found]
        except QuorumUnavailable as error:
            reason = str(error)
        # Meanwhile another rank may have stood still for longer than the run went on.
        return Answer(self.over(request.state.step), reason, quorum_id, members)

    def over(self, step: int) -> str:
        """The name of the turn that ends this start of the group with the state after `step`, on rank 0, which speaks
        for all; empty if it goes on.

        It is too late if the others ended the run, while this group was busy, with a later state. A group that left
        alone has ended nothing for those that were not asked to.
        """
        files = self._host.files
        if self._decisions.rank:
            return ""
        if files.fenced():
            return Turn.FENCED.name
        finished = files.finished_step()
        if finished == self._finished_before or step >= finished:
            return ""
        return Turn.TOO_LATE.name if files.asked_to_leave() or files.ended_for_all() else ""

    def _tell_left_out(self, quorum: Quorum) -> None:
        """When others are left out than before, the first of those that are not says so."""
        if quorum.left_out != self._left_out and (self._group.id, self._decisions.rank) == (quorum.groups[0], 0):
            told = {"groups": list(quorum.left_out), "cut": [list(pair) for pair in quorum.cut]}
            self._host.events.emit("left_out", quorum.state.step + 1, **told, reason=differing_settings(self._met))
        self._left_out = quorum.left_out
