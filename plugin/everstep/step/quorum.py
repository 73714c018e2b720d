"""A quorum as values: what a group says when it asks, what all members then know, and who heals from whom.

Everything here is pure: from the same quorum every member decides the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

NO_STATE = -1


@dataclass(frozen=True, slots=True)
class Request:
    """What a group says of itself when it asks for a quorum.

    Attributes:
        group: its id.
        life: differs after every start of the group.
        number: counts the requests of this life, from 1; a quorum is believed only for the newest.
        step: the last step whose state it has; NO_STATE when it has none.
        history: of that state (`ledger.extend`); 0 without one.
        suspect: an audit named its parameters; the state is a fallback, used when nobody else has one.
        follows: it has no state yet, but the summed gradients of every step from the state it is receiving up to
            `follows`, so it needs no other source while the members go on from there; NO_STATE if it follows nothing.
        followed: history after `follows`.
        finishing: it makes no more steps and waits for the last state to be saved.
        connected: key of the quorum whose process group it is connected in; empty for none.
        store: `host:port` of a TCPStore of this group that the others reach.
        doors: `host:port` where each of its ranks serves its state.
    """

    group: int
    life: str
    number: int
    step: int
    history: int
    suspect: bool
    follows: int
    followed: int
    finishing: bool
    connected: str
    store: str
    doors: tuple[str, ...]


Member = Request
"""A member of a quorum is known by its request."""

_TEXT = json.JSONEncoder(separators=(",", ":"))
_NAMES = dict.fromkeys(field.name for field in fields(Request))
_NUMBERS = ("group", "number", "step", "history", "follows", "followed")
_FLAGS = ("suspect", "finishing")
_TEXTS = ("life", "connected", "store")


def encode(request: Request) -> str:
    """As JSON text."""
    return _TEXT.encode({name: getattr(request, name) for name in _NAMES})


def decode(text: str) -> Request:
    """The inverse of `encode`. Raises ValueError for anything else, whatever its type."""
    try:
        found = json.loads(text)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a request: {error}") from None
    if type(found) is not dict or found.keys() != _NAMES.keys():
        raise ValueError("not a request: other fields")
    for name in _NUMBERS:
        if type(found[name]) is not int or not -1 <= found[name] < 1 << 63:
            raise ValueError(f"not a request: {name} is no number")
    doors = found["doors"]
    if type(doors) is not list or {*map(type, doors)} - {str}:
        raise ValueError("not a request: doors are no addresses")
    if {type(found[name]) for name in _FLAGS} != {bool} or {type(found[name]) for name in _TEXTS} != {str}:
        raise ValueError("not a request: wrong types")
    if found["group"] < 0:
        raise ValueError("not a request: no group")
    found["doors"] = tuple(doors)
    return Request(**cast("dict[str, Any]", found))


@dataclass(frozen=True, slots=True)
class Quorum:
    """What all ranks of a group know after a quorum.

    Attributes:
        id: torchft's, for logs; starts again from 1 when the lighthouse does.
        members: in the order of their group ids.
        key: differs from every other quorum's; the same on all members.
        step: the newest step whose state counts; NO_STATE when no member has any.
        history: of that state.
        able: groups that have it: they compute.
        sources: joiner → the group that it takes the state from. Joiners that follow need none.
    """

    id: int
    members: tuple[Member, ...]
    key: str
    step: int
    history: int
    able: tuple[int, ...]
    sources: dict[int, int]

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(member.group for member in self.members)

    def member(self, group: int) -> Member:
        return self.members[self.groups.index(group)]

    def is_finishing(self) -> bool:
        """Whether a group that has the newest state makes no more steps: then nobody does."""
        return any(self.member(group).finishing for group in self.able)

    def connected_in(self) -> str:
        """The process group that all members are in already, and nobody else; empty if there is none."""
        keys = {member.connected for member in self.members}
        return keys.pop() if len(keys) == 1 else ""

    def rank(self, group: int) -> int:
        return self.groups.index(group)

    def store(self) -> str:
        """The store to connect over: of the first group that has a state, since joiners come and go."""
        return self.member(self.able[0]).store


def read_quorum(quorum_id: int, members: Sequence[Member]) -> Quorum:
    """What the members of a quorum make of it.

    The state that counts is the newest that no audit has named; where groups at that step went different ways, the
    way that most of them went, and of equally many that of the lowest group id. Named states count only when there is
    no other. All other members heal, each from one of those that have the state, in turn.

    Raises:
        ValueError: a group is there twice, or nobody is.
    """
    ordered = tuple(sorted(members, key=lambda member: member.group))
    if not ordered or len({member.group for member in ordered}) < len(ordered):
        raise ValueError(f"groups {[member.group for member in ordered]} cannot be the members of a quorum")
    text = "/".join(f"{member.group}:{member.life}:{member.number}" for member in ordered)
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    having = [member for member in ordered if member.step > NO_STATE]
    trusted = [member for member in having if not member.suspect] or having
    if not trusted:
        return Quorum(quorum_id, ordered, key, NO_STATE, 0, (), {})
    step = max(member.step for member in trusted)
    newest = [member for member in trusted if member.step == step]
    ways = Counter(member.history for member in newest)
    history = max(newest, key=lambda member: (ways[member.history], -member.group)).history
    able = tuple(member.group for member in newest if member.history == history)
    needing = [
        member.group
        for member in ordered
        if member.group not in able and (member.follows, member.followed) != (step, history)
    ]
    sources = {group: able[place % len(able)] for place, group in enumerate(needing)}
    return Quorum(quorum_id, ordered, key, step, history, able, sources)
