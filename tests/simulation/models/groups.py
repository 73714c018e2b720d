"""Groups and one lighthouse, exhaustively: every interleaving of asking, giving one's part, committing, healing,
missing the end of a sum, giving up, deaths, late heartbeats, join timeouts and restarts of the lighthouse, within
bounds.

The lighthouse is `simulation.lighthouse` with time abstracted away: heartbeats are late or not, the join timeout may
pass at any moment. Who computes, who heals and from whom is decided by the real `read_quorum`. A history is the tuple
of the quorums in which its steps were committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from everstep.step.quorum import NO_STATE, Quorum, Request, read_quorum

History = tuple[int, ...]
FAULTS = ("miss", "kill", "late", "restart", "timeout", "left-over", "heal-fails")


class Ask(NamedTuple):
    """A request, as the lighthouse has it."""

    group: int
    life: int
    number: int
    step: int
    history: History
    follows: History | None


class Group(NamedTuple):
    """One group.

    Attributes:
        phase: idle, asked, in (a quorum) or sent (its part of the sum).
        history: of its state; its step is the length of it. None without a state.
        life, number: of its newest request.
        quorum: which it is in; -1 for none.
        healing: base of the state on its way here and the history that it follows; None if it does not heal.
    """

    phase: str = "idle"
    history: History | None = ()
    life: int = 0
    number: int = 0
    quorum: int = -1
    healing: tuple[History, History] | None = None


class Meeting(NamedTuple):
    id: int
    members: tuple[Ask, ...]
    given: frozenset[int]


class World(NamedTuple):
    groups: tuple[Group, ...]
    meetings: tuple[Meeting, ...]
    previous: tuple[int, ...] | None
    asking: tuple[Ask, ...]
    beating: frozenset[int]
    quorums: int
    faults: int


class Bounds(NamedTuple):
    groups: int
    faults: int
    steps: int
    kinds: tuple[str, ...] = FAULTS
    most: int = 10**9


def step_of(history: History | None) -> int:
    return NO_STATE if history is None else len(history)


def read(meeting: Meeting) -> tuple[Quorum, dict[int, History]]:
    """What the members make of a quorum; and each history by the number that stands for it there."""
    numbers: dict[History, int] = {}

    def number(history: History | None) -> int:
        return 0 if history is None else numbers.setdefault(history, len(numbers) + 1)

    members = [
        Request(
            group=ask.group,
            life=str(ask.life),
            number=ask.number,
            step=ask.step,
            history=number(ask.history if ask.step > NO_STATE else None),
            suspect=False,
            follows=step_of(ask.follows),
            followed=number(ask.follows),
            finishing=False,
            connected="",
            store="",
            doors=(),
        )
        for ask in meeting.members
    ]
    return read_quorum(meeting.id, members), {number: history for history, number in numbers.items()}


class Model:
    def __init__(self, bounds: Bounds, compare_histories: bool = True) -> None:
        self.bounds, self.compare_histories = bounds, compare_histories

    def start(self) -> World:
        everybody = tuple(range(self.bounds.groups))
        return World(tuple(Group() for _ in everybody), (), everybody, (), frozenset(everybody), 0, 0)

    def put(self, world: World, place: int, **changes: Any) -> World:
        groups = world.groups
        changed = groups[place]._replace(**changes)
        return world._replace(groups=(*groups[:place], changed, *groups[place + 1 :]))

    def tick(self, world: World, *, waited: bool) -> World:
        """The lighthouse looks whether there is a quorum; `waited`: the join timeout has passed."""
        asking = tuple(ask for ask in world.asking if ask.group in world.beating)
        there = {ask.group for ask in asking}
        fast = world.previous is not None and all(member in there for member in world.previous)
        enough = len(there) > len(world.beating) // 2 and (waited or there == world.beating)
        if not there or not (fast or enough):
            return world
        meeting = Meeting(world.quorums, tuple(sorted(asking)), frozenset())
        for ask in asking:
            group = world.groups[ask.group]
            if group.phase == "asked" and (group.life, group.number) == (ask.life, ask.number):
                world = self.put(world, ask.group, phase="in", quorum=meeting.id)
            elif group.phase == "asked":
                world = self.put(world, ask.group, phase="idle")  # a quorum for an earlier request is not believed
        return world._replace(
            meetings=(*world.meetings, meeting), previous=tuple(sorted(there)), asking=(), quorums=world.quorums + 1
        )

    def ask(self, world: World, place: int) -> World:
        group = world.groups[place]
        history = group.history
        follows = group.healing[1] if group.healing else None
        ask = Ask(place, group.life, group.number, step_of(history), history or (), follows)
        asking = (*(other for other in world.asking if other.group != place), ask)
        return self.tick(world._replace(asking=tuple(sorted(asking)), beating=world.beating | {place}), waited=False)

    def nexts(self, world: World) -> Iterator[tuple[World, str]]:
        """What may happen next, and in words."""
        fault = world.faults < self.bounds.faults

        def broken(changed: World) -> World:
            return changed._replace(faults=changed.faults + 1)

        def may(kind: str) -> bool:
            return fault and kind in self.bounds.kinds

        for place, group in enumerate(world.groups):
            if group.phase == "idle" and step_of(group.history) < self.bounds.steps:
                # Numbers only tell a request from an earlier one that may still be at the lighthouse.
                asked = self.put(world, place, phase="asked", number=group.number)
                yield self.ask(asked, place), f"{place} asks"
            waits = any((ask.group, ask.life, ask.number) == (place, group.life, group.number) for ask in world.asking)
            if group.phase == "asked":
                if not waits:
                    yield self.ask(world, place), f"{place} asks the lighthouse again"
                elif may("left-over"):
                    yield (
                        broken(self.put(world, place, phase="idle", number=group.number + 1)),
                        f"{place} gives up asking",
                    )
            if group.healing is not None:
                base, follows = group.healing
                sources = [
                    other for other in world.groups if other.history is not None and other.history[: len(base)] == base
                ]
                if group.phase == "idle" and sources:
                    yield self.put(world, place, history=follows, healing=None), f"{place} has healed"
                if not sources or may("heal-fails"):
                    failed = self.put(world, place, healing=None)
                    yield (broken(failed) if sources else failed), f"{place} cannot heal"
            if group.phase in ("in", "sent"):
                yield from self.meet(world, place, group, may, broken)
            if may("kill") and group.history is not None:
                dead = Group(history=None, life=group.life + 1)
                gone = world._replace(groups=(*world.groups[:place], dead, *world.groups[place + 1 :]))
                yield broken(gone._replace(beating=gone.beating - {place})), f"{place} is killed"
            if place in world.beating and may("late"):
                yield broken(world._replace(beating=world.beating - {place})), f"heartbeats of {place} are late"
            if place not in world.beating:
                yield self.tick(world._replace(beating=world.beating | {place}), waited=False), f"{place} is heard"
        waited = self.tick(world, waited=True)
        if waited != world:
            yield waited, "the join timeout passes"
        if may("restart"):
            yield broken(world._replace(previous=None, asking=(), beating=frozenset())), "the lighthouse is restarted"

    def meet(self, world: World, place: int, group: Group, may: Any, broken: Any) -> Iterator[tuple[World, str]]:
        meeting = next(meeting for meeting in world.meetings if meeting.id == group.quorum)
        quorum, histories = read(meeting)
        if quorum.step == NO_STATE:
            yield self.put(world, place, phase="idle", quorum=-1), f"{place} finds no state"
            return
        base = histories[quorum.history]
        able = quorum.able
        if not self.compare_histories:
            able = tuple(ask.group for ask in meeting.members if ask.step == quorum.step)
        if group.phase == "in":
            given = meeting._replace(given=meeting.given | {place})
            meetings = tuple(given if other is meeting else other for other in world.meetings)
            healing = group.healing
            if place in able:
                healing = None
            elif place in quorum.sources:
                healing = (base, base)
            yield (
                self.put(world._replace(meetings=meetings), place, phase="sent", healing=healing),
                f"{place} gives its part",
            )
        whole = all(ask.group in meeting.given for ask in meeting.members)
        if group.phase == "sent" and whole:
            if place in able:
                assert group.history is not None
                done = self.put(world, place, phase="idle", quorum=-1, history=(*group.history, meeting.id))
                yield (
                    done,
                    f"{place} commits step {quorum.step + 1} with {[ask.group for ask in meeting.members]} of {able}",
                )
            elif group.healing is not None:
                healing = (group.healing[0], (*base, meeting.id))
                yield self.put(world, place, phase="idle", quorum=-1, healing=healing), f"{place} follows"
            else:
                yield self.put(world, place, phase="idle", quorum=-1), f"{place} looks on"
            if may("miss"):
                missed = self.put(world, place, phase="idle", quorum=-1)
                yield broken(missed), f"{place} misses the end of the sum"
        gone = any(
            ask.group not in meeting.given and world.groups[ask.group].quorum != meeting.id for ask in meeting.members
        )
        if gone and not whole:
            yield self.put(world, place, phase="idle", quorum=-1), f"{place} gives up: a member is gone"
        elif group.phase == "sent" and not whole and may("timeout"):
            yield broken(self.put(world, place, phase="idle", quorum=-1)), f"{place} gives up waiting"

    def wrong(self, before: World, after: World, what: str) -> str:
        """What a step of the model breaks; empty if nothing."""
        for place, group in enumerate(after.groups):
            old = before.groups[place]
            if group.quorum == -1 and old.quorum != -1 and "commits" in what and old.history != group.history:
                meeting = next(meeting for meeting in before.meetings if meeting.id == old.quorum)
                quorum, histories = read(meeting)
                able = (
                    quorum.able
                    if self.compare_histories
                    else tuple(ask.group for ask in meeting.members if ask.step == quorum.step)
                )
                bases = {ask.history for ask in meeting.members if ask.group in able}
                if len(bases) > 1:
                    return "two histories are summed"
                if old.history != histories[quorum.history]:
                    return "a step is applied to another state"
        top = max(map(_newest, before.groups))
        if max(map(_newest, after.groups)) < top and "killed" not in what:
            return "the newest step is lost though nobody died"
        return ""


def _newest(group: Group) -> int:
    return step_of(group.history)


def canonical(world: World) -> Any:
    """Equal for worlds that differ only in names of quorums and numbers of requests."""
    used = {group.quorum for group in world.groups}
    names: dict[int, int] = {}

    def name(quorum: int) -> int:
        return -1 if quorum < 0 else names.setdefault(quorum, len(names))

    def rename(history: History | None) -> History | None:
        return None if history is None else tuple(name(quorum) for quorum in history)

    newest = {place: (group.life, group.number) for place, group in enumerate(world.groups)}
    groups = tuple(
        (group.phase, rename(group.history), name(group.quorum), group.healing and tuple(map(rename, group.healing)))
        for group in world.groups
    )

    def ask_of(ask: Ask) -> Any:
        fresh = newest[ask.group] == (ask.life, ask.number)
        return ask.group, fresh, ask.step, rename(ask.history), rename(ask.follows)

    meetings = tuple(
        (name(meeting.id), tuple(map(ask_of, meeting.members)), meeting.given)
        for meeting in world.meetings
        if meeting.id in used
    )
    return groups, meetings, world.previous, tuple(map(ask_of, world.asking)), world.beating, world.faults


class Explored(NamedTuple):
    states: int
    whole: bool
    wrong: dict[str, list[str]]
    stuck: int
    """States from which no state can be reached in which some group has made all steps."""


def explore(bounds: Bounds, *, compare_histories: bool = True) -> Explored:
    model = Model(bounds, compare_histories)
    start = model.start()
    keys = {canonical(start): 0}
    parents: list[tuple[int, str]] = [(-1, "")]
    back: list[list[int]] = [[]]
    wrong: dict[str, list[str]] = {}
    done: list[int] = []
    queue = deque([(0, start)])

    def path(state: int) -> list[str]:
        words = []
        while state > 0:
            state, what = parents[state]
            words.append(what)
        return words[::-1]

    while queue and len(keys) < bounds.most:
        number, world = queue.popleft()
        if max(map(_newest, world.groups)) >= bounds.steps or all(group.history is None for group in world.groups):
            done.append(number)
        for after, what in model.nexts(world):
            if all(group.quorum != meeting.id for group in after.groups for meeting in after.meetings):
                after = after._replace(meetings=())
            problem = model.wrong(world, after, what)
            if problem and problem not in wrong:
                wrong[problem] = [*path(number), what]
            if problem:
                continue
            used = {group.quorum for group in after.groups}
            after = after._replace(meetings=tuple(meeting for meeting in after.meetings if meeting.id in used))
            key = canonical(after)
            found = keys.get(key)
            if found is None:
                found = keys[key] = len(keys)
                parents.append((number, what))
                back.append([])
                queue.append((found, after))
            back[found].append(number)
    reached, queue_back = set(done), deque(done)
    while queue_back:
        for before in back[queue_back.popleft()]:
            if before not in reached:
                reached.add(before)
                queue_back.append(before)
    return Explored(len(keys), not queue, wrong, len(keys) - len(reached))
