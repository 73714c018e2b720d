"""How a group asks for its next quorum: rank 0 asks the lighthouse, and all ranks learn the same from it."""

import json
from typing import NamedTuple

from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.membership import Membership
from everstep.quorum.request import Member, Quorum, Request, decode, encode, read_quorum
from everstep.step import ledger
from everstep.step.attempt import Group, Host, State, Turn
from everstep.step.decisions import Decisions
from everstep.step.interfaces import Timeouts

OVER = None, Turn.FENCED, Turn.TOO_LATE
"""Which turn ends this start of a group; None if it goes on."""


class Answer(NamedTuple):
    """What rank 0 tells the others: a place in OVER; why there is no quorum, empty if there is one; its id and members
    (`request.encode`)."""

    over: int
    reason: str
    id: int
    members: list[str]


class Asker:
    """One rank's part in it.

    Args:
        group: this rank's.
        decisions: of the group.
        host: of this rank.
        timeouts: the protocol's.
    """

    def __init__(
        self,
        group: Group,
        decisions: Decisions,
        host: Host,
        timeouts: Timeouts,
    ) -> None:
        self._group, self._decisions, self._host = group, decisions, host
        self._timeouts, self._finished_before = timeouts, host.files.finished_step()
        self._doors: tuple[str, ...] = ()
        self._watches: tuple[str, ...] = ()
        self._met: tuple[Member, ...] = ()
        """All that asked for the last quorum."""
        self._left_out: tuple[int, ...] = ()
        self._asked = 0

    def ask(
        self, state: State, follows: State, *, finishing: bool, connected: str, brief: bool
    ) -> Quorum | Turn | None:
        """The next quorum, the same on all ranks of the group; None when there is none now; FENCED or TOO_LATE if this
        start of the group is not to go on. Decisions of the group.

        Args:
            state, follows: what the group has, and what it will have once it has caught up.
            finishing: see `Request`.
            connected: key of the quorum whose process group it is connected in; empty for none.
            brief: whether to wait no longer than for a group that lives and does not ask.
        """
        self._asked += 1
        if not self._doors:
            mine = f"{self._group.door.address} {self._group.sums.address}"
            said = self._decisions.gather_bytes("addresses", mine.encode())
            self._doors, self._watches = zip(*(each.decode().split() for each in said), strict=True)
        begun, unreached, told = self._host.clock.now(), self._agree_on_unreached(), ()
        if self._group.membership is not None:
            request = Request(
                group=self._group.id,
                life=self._group.life,
                number=self._asked,
                step=state.step,
                history=state.history,
                follows=follows.step,
                followed=follows.history,
                finishing=finishing,
                connected=connected,
                store=self._group.store,
                doors=self._doors,
                watches=self._watches,
                unreached=unreached,
            )
            told = self._ask_lighthouse(self._group.membership, request, brief)
        answer = Answer(*json.loads(self._decisions.first("quorum", json.dumps(told).encode())))
        step, events = state.step + 1, self._host.events
        if answer.reason:
            waited_s = round(self._host.clock.now() - begun, 3)
            events.emit("quorum_failed", step, reason=answer.reason, waited_s=waited_s)
        if answer.over:
            return OVER[answer.over]
        if answer.reason:
            return None
        self._met = tuple(map(decode, answer.members))
        quorum = read_quorum(answer.id, self._met)
        self._tell_left_out(quorum)
        return quorum

    def _agree_on_unreached(self) -> tuple[str, ...]:
        """Names of those that asked for the last quorum and that some rank of this group does not reach."""
        rank, missing = self._decisions.rank, self._group.sums.unreached()
        mine = frozenset(place for place, member in enumerate(self._met) if member.watches[rank] in missing)
        said = self._decisions.gather("unreached", ledger.pack(mine, len(self._met)))
        places = frozenset().union(*(ledger.unpack(words, len(self._met)) for words in said))
        return tuple(self._met[place].name for place in sorted(places))

    def _ask_lighthouse(self, membership: Membership, request: Request, brief: bool) -> Answer:
        """Rank 0's question and its answer."""
        quorum_id, members, reason, timeouts = 0, list[str](), "", self._timeouts
        if over := self.over(request.step):
            return Answer(over, reason, quorum_id, members)
        try:
            patience = min(timeouts.quorum, timeouts.join) if brief else timeouts.quorum
            quorum_id, found = membership.ask(request, patience)
            members = [encode(member) for member in found]
        except QuorumUnavailable as error:
            reason = str(error)
        # Meanwhile another rank may have stood still for longer than the run went on.
        return Answer(self.over(request.step), reason, quorum_id, members)

    def is_wanted(self) -> bool:
        """Whether this rank has heard that somebody else wants a quorum."""
        return self._group.membership is not None and self._group.membership.wanted

    def over(self, step: int) -> int:
        """The place in OVER for this start of the group with the state after `step`; on rank 0, which speaks for all.

        It is too late if the others ended the run, while this group was busy, with a later state. A group that left
        alone has ended nothing for those that were not asked to.
        """
        files = self._host.files
        if self._decisions.rank:
            return OVER.index(None)
        if files.fenced():
            return OVER.index(Turn.FENCED)
        finished = files.finished_step()
        if finished == self._finished_before or step >= finished:
            return OVER.index(None)
        return OVER.index(Turn.TOO_LATE if files.asked_to_leave() or files.ended_for_all() else None)

    def _tell_left_out(self, quorum: Quorum) -> None:
        """When others are left out than before, the first of those that are not says so."""
        if quorum.left_out != self._left_out and (self._group.id, self._decisions.rank) == (quorum.groups[0], 0):
            cut = [list(pair) for pair in quorum.cut]
            self._host.events.emit("left_out", quorum.step + 1, groups=list(quorum.left_out), cut=cut)
        self._left_out = quorum.left_out
