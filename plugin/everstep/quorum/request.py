"""A quorum as values: what a group says when it asks, what all members then know, and who heals from whom.

Everything here is pure: from the same quorum every member decides the same.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from everstep.run import typed

NO_STATE = -1
LENDERS = 4
"""Groups that a joiner takes the state from, if there are as many. Each holds a copy of it in its hosts' memory
meanwhile. Where all links are alike one or two fill the joiner's; the others are there in place of those that are busy,
slow or gone."""

Word = Annotated[int, typed.Within(NO_STATE, (1 << 63) - 1)]


@dataclass(frozen=True, slots=True)
class State:
    """Which state a group has: after `step`, of `history` (`ledger.extend`); NO_STATE and 0 for none."""

    step: Word
    history: Word


NOTHING = State(NO_STATE, 0)


def name_of(group: int, life: str) -> str:
    """Of one life of a group; differs from that of every other."""
    return f"{group}:{life}"


def group_of(name: str) -> str:
    """Whose name it is, if `name_of` made it."""
    return name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Request:
    """What a group says of itself when it asks for a quorum.

    Attributes:
        group: its id.
        life: differs after every start of the group.
        number: counts the requests of this life, from 1; a quorum is believed only for the newest.
        state: the last that it has.
        follows: it does not have this state yet, but the one before that it is receiving, and the summed gradients of
            every step between them, so it needs no other source while the members go on from there; or NOTHING.
        finishing: it makes no more steps and waits for the last state to be saved.
        connected: key of the quorum whose process group it is connected in; empty for none.
        store: `host:port` of a TCPStore of this group that the others reach.
        doors: `host:port` where each of its ranks serves its state.
        watches: `host:port` where each of its ranks is reached by the same rank of the others.
        unreached: names of members that some rank of it could not reach lately.
        makers: how many groups make the steps of the last quorum that it was in and are not known to have died.
        settings: `name = value` of what groups that sum together have alike.
    """

    group: typed.Count
    life: str
    number: typed.Count
    state: State
    follows: State
    finishing: bool
    connected: str
    store: str
    doors: tuple[str, ...]
    watches: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    makers: typed.Count = 0
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.group, self.life)


def encode(request: Request) -> str:
    """As JSON text."""
    return typed.dumps(asdict(request)).decode()


@functools.lru_cache(1024)
def decode(text: str) -> Request:
    """The inverse of `encode`. Raises UnfitError for anything else. A process comes by most requests several times."""
    return typed.parse(Request, typed.loads(text), "a request")


@dataclass(frozen=True, slots=True)
class Quorum:
    """What all ranks of a group know after a quorum.

    Attributes:
        id: torchft's, for logs; starts again from 1 when the lighthouse does.
        members: those that reach each other, in the order of their group ids, each by its request.
        key: differs from every other quorum's; the same on all members.
        state: the one that counts; NOTHING when no member has any.
        able: groups that have it: they compute.
        sources: joiner → the groups that it takes the state from, LENDERS at most. Joiners that follow need none.
        left_out: groups that asked as well and cannot be connected with all members (`together`).
        cut: pairs of groups that do not reach each other, or have other settings, the lower id first.
    """

    id: int
    members: tuple[Request, ...]
    key: str
    state: State
    able: tuple[int, ...]
    sources: dict[int, tuple[int, ...]]
    left_out: tuple[int, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(member.group for member in self.members)

    def member(self, group: int) -> Request:
        return self.members[self.groups.index(group)]

    def is_finishing(self) -> bool:
        """Whether a group that has the newest state makes no more steps: then nobody does."""
        return any(self.member(group).finishing for group in self.able)

    def connected_in(self) -> str:
        """The process group that all members are in already, and nobody else; empty if there is none."""
        keys = {member.connected for member in self.members}
        return keys.pop() if len(keys) == 1 else ""

    def moved_on(self, state: State, able: tuple[int, ...]) -> "Quorum":
        """What its members make of it after they committed a step and nobody wants another one: `able` made the step
        and have its state, and all others follow."""
        return replace(self, state=state, able=able, sources={})

    def makers(self) -> str:
        """A word for those that make its steps, the same in each quorum of theirs; empty if nobody has a state."""
        able = set(self.able)
        names = "/".join(member.name for member in self.members if member.group in able)
        return hashlib.blake2b(names.encode(), digest_size=8).hexdigest() if names else ""


def together(groups: Sequence[int], cut: Collection[tuple[int, int]], able: Collection[int]) -> tuple[int, ...]:
    """Groups that all reach each other: the one that is cut off from most others is left out first, of several that of
    the highest id, but not the last that is able. Who reaches all that are left after that is not left out.

    Args:
        groups: their ids.
        cut: pairs of which at least one does not reach the other.
        able: groups that have the state.
    """
    inside = set(groups)
    while pairs := [pair for pair in cut if inside.issuperset(pair)]:
        apart = Counter(group for pair in pairs for group in pair)
        having = inside.intersection(able)
        inside.remove(max(apart.keys() - (having if len(having) == 1 else ()), key=lambda one: (apart[one], one)))
    for group in groups:
        if not any(group in pair and not inside.isdisjoint(pair) for pair in cut):
            inside.add(group)
    return tuple(sorted(inside))


def read_quorum(quorum_id: int, members: Sequence[Request]) -> Quorum:
    """What the members of a quorum make of it.

    The state that counts is the newest; where groups at that step went different ways, the way that most of them went,
    and of equally many that of the lowest group id. Members that do not reach each other are not connected
    (`together`). All others that lack the state heal, each from several of those that have it, and if there are enough
    from other ones than the joiner before.

    Raises:
        ValueError: a group is there twice, or nobody is.
    """
    ordered = tuple(sorted(members, key=lambda member: member.group))
    if not ordered or len({member.group for member in ordered}) < len(ordered):
        raise ValueError(f"groups {[member.group for member in ordered]} cannot be the members of a quorum")
    state, able = _state_that_counts(ordered)
    names = {member.name: member.group for member in ordered}
    told = [(member.group, names[name]) for member in ordered for name in member.unreached if name in names]
    if differing_settings(ordered):
        told += [(a.group, b.group) for a in ordered for b in ordered if a.settings != b.settings]
    cut = tuple(sorted({(min(pair), max(pair)) for pair in told}))
    inside = together([member.group for member in ordered], cut, able)
    left_out = tuple(member.group for member in ordered if member.group not in inside)
    ordered = tuple(member for member in ordered if member.group in inside)
    able = tuple(group for group in able if group in inside)
    text = "/".join(f"{member.group}:{member.life}:{member.number}" for member in ordered)
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    needing = [member.group for member in ordered if able and member.group not in able and member.follows != state]
    lenders = range(min(LENDERS, len(able)))
    apart = max(1, len(able) // LENDERS)
    sources = {
        group: tuple(able[(place + apart * number) % len(able)] for number in lenders)
        for place, group in enumerate(needing)
    }
    return Quorum(quorum_id, ordered, key, state, able, sources, left_out, cut)


def differing_settings(members: Sequence[Request]) -> str:
    """Which groups have other settings than most, and which, in words; empty if all have the same."""
    usual = Counter(member.settings for member in members).most_common(1)[0][0]

    def beyond(one: Collection[str], other: Collection[str]) -> str:
        return ", ".join(word for word in one if word not in other)

    odd = [one for one in members if one.settings != usual]
    return "; ".join(
        f"group {one.group} has {beyond(one.settings, usual)} and most have {beyond(usual, one.settings)}"
        for one in odd
    )


def _state_that_counts(members: Sequence[Request]) -> tuple[State, tuple[int, ...]]:
    """The state that counts, and the groups that have it."""
    ways = Counter(member.state for member in members)
    state = max(members, key=lambda member: (member.state.step, ways[member.state], -member.group)).state
    return state, tuple(member.group for member in members if member.state == state != NOTHING)
