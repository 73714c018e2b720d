"""Requests and quorums as values: which members of a quorum are connected, which state counts, who heals from whom.

All functions are pure: from the same requests, every member computes the same quorum.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field
from pydantic_core import to_json

from everstep.run import typed

NO_STATE, DIGITS = -1, 19
LENDERS = 4
"""Groups that a joiner fetches the state from, if there are as many. Each keeps a copy of it in its hosts' memory
meanwhile. On equal links, one or two saturate the joiner's; the others replace those that are busy, slow or dead."""

Word = Annotated[int, Field(ge=NO_STATE, le=(1 << 63) - 1)]


@dataclass(frozen=True, slots=True)
class State:
    """Names the state after `step`, of `history` (`ledger.next_history`); NO_STATE and 0 if a group has none."""

    step: Word
    history: Word


NOTHING = State(NO_STATE, 0)


def name_of(group: int, life: str) -> str:
    """Return the name of one start (life) of a group, unique in the run. torchft's replica id."""
    return f"{group}:{life}"


def group_of(name: str) -> str:
    """Return the group id, as text, in a name that `name_of` made."""
    return name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Request:
    """What a group says of itself when it asks for a quorum.

    Attributes:
        group: its group id.
        life: name of this start of the group; another one after every restart.
        number: above the numbers of this life's earlier requests, and of all requests in its last quorum. A quorum
            counts only for the newest request.
        state: the newest state that it has.
        follows: the state that it will have once its heal is complete: it is fetching an earlier state, and keeps the
            summed gradients of every step since. While the members go on from `follows`, it needs no other source.
            NOTHING if it does not heal.
        finishing: whether it makes no more steps and waits for the last state to be saved.
        connected: key of the quorum whose process group it is connected in; empty for none.
        store: `host:port` of a TCPStore of this group that the other groups can connect to.
        state_addresses: by rank, `host:port` where the rank serves its state.
        watches: by rank, `host:port` where the other groups' ranks of the same column connect to it.
        unreached: names of members that one of its ranks lately could not connect to.
        makers: number of groups that make the steps of its last quorum and are not known to have died.
        settings: `name = value` of each setting that groups which sum together must share.
    """

    group: typed.Count
    life: str
    number: typed.Count
    state: State
    follows: State
    finishing: bool
    connected: str
    store: str
    state_addresses: tuple[str, ...]
    watches: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    makers: typed.Count = 0
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.group, self.life)


def encode(request: Request) -> str:
    """Return a request as JSON text."""
    return to_json(request).decode()


@functools.lru_cache(1024)
def decode(text: str) -> Request:
    """Read what `encode` returned; raises UnfitError for anything else. Cached, as most requests are read again."""
    return typed.parse(Request, typed.loads(text), "a request")


@dataclass(frozen=True, slots=True)
class Quorum:
    """A quorum as all ranks of its groups know it.

    Attributes:
        id: torchft's id, for logs; starts again from 1 when the lighthouse restarts.
        members: requests of the groups that can connect to each other, by ascending group id.
        key: name of this quorum, unique and the same on all members.
        state: the state that counts; NOTHING if no member has one.
        able: groups that have this state, and so compute.
        sources: joiner → groups that it fetches the state from, LENDERS at most. Joiners that follow have no entry.
        left_out: groups that asked too, but cannot be connected with all members (`together`).
        cut: pairs of groups that cannot reach each other or have different settings, the lower id first.
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
        """Return the request of a member. Raises ValueError for another group."""
        return self.members[self.groups.index(group)]

    def is_finishing(self) -> bool:
        """Whether a group that has the newest state makes no more steps. Then no group makes any."""
        return any(self.member(group).finishing for group in self.able)

    def connected_in(self) -> str:
        """Return the key of the process group that all members are connected in already; empty if there is none."""
        keys = {member.connected for member in self.members}
        return keys.pop() if len(keys) == 1 else ""

    def moved_on(self, state: State, able: tuple[int, ...]) -> "Quorum":
        """Return this quorum for the next step, if its members have committed one and need no new quorum. `able` made
        that step and have its state; all other members follow."""
        return replace(self, state=state, able=able, sources={})

    def makers_word(self) -> str:
        """Return its first state's step and its highest request's number, in DIGITS digits each, by which newer quorums
        are greater; and a hash of the groups that make its steps, equal in every quorum in which the same ones do.
        Empty if no group has a state."""
        able = set(self.able)
        names = "/".join(member.name for member in self.members if member.group in able)
        makers = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
        newest = max(member.number for member in self.members)
        return f"{self.state.step:0{DIGITS}}{newest:0{DIGITS}}{makers}" if names else ""


def together(groups: Sequence[int], cut: Collection[tuple[int, int]], able: Collection[int]) -> tuple[int, ...]:
    """Return the groups that can all be connected with each other.

    Groups are left out one by one: first the one that is cut off from the most others, of several that with the highest
    id, but never the last one that is able. A group that reaches all the remaining ones is then taken back in.

    Args:
        groups: ids of all groups.
        cut: pairs of groups that cannot reach each other, in at least one direction.
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
    """Return the quorum that follows from the requests of its members.

    The state that counts is the newest. If groups at that step have different histories, the most common history
    counts, in a tie that of the lowest group id. Members that cannot reach each other are not connected (`together`).
    Members without the state heal from several groups that have it; if there are enough of these, each joiner uses
    others than the joiner before.

    Raises:
        ValueError: a group occurs twice, or there is no member.
    """
    ordered = tuple(sorted(members, key=lambda member: member.group))
    if not ordered or len({member.group for member in ordered}) < len(ordered):
        raise ValueError(f"a quorum has each of its members once, not groups {[member.group for member in ordered]}")
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
    apart = max(1, len(able) // LENDERS)
    sources = {
        group: tuple(able[(place + apart * number) % len(able)] for number in range(min(LENDERS, len(able))))
        for place, group in enumerate(needing)
    }
    return Quorum(quorum_id, ordered, key, state, able, sources, left_out, cut)


def differing_settings(members: Sequence[Request]) -> str:
    """Return which groups have other settings than most, and which settings, as text; empty if all are equal."""
    usual = Counter(member.settings for member in members).most_common(1)[0][0]

    def beyond(one: Collection[str], other: Collection[str]) -> str:
        return ", ".join(word for word in one if word not in other)

    odd = [one for one in members if one.settings != usual]
    return "; ".join(
        f"group {one.group} has {beyond(one.settings, usual)} and most have {beyond(usual, one.settings)}"
        for one in odd
    )


def _state_that_counts(members: Sequence[Request]) -> tuple[State, tuple[int, ...]]:
    """Return the state that counts, and the groups that have it."""
    ways = Counter(member.state for member in members)
    state = max(members, key=lambda member: (member.state.step, ways[member.state], -member.group)).state
    return state, tuple(member.group for member in members if member.state == state != NOTHING)
