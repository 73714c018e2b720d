"""The kinds of faults. A seed draws which faults a run meets, and when, before the run begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from simulation import real
from simulation.checks import Sick
from simulation.nodes import TOKEN
from simulation.scheduler import Process

if TYPE_CHECKING:
    from simulation.groups import Life, Rank
    from simulation.nodes import LighthouseNode
    from simulation.world import World

STRAYS = ("", "{}", "[1, 2]", "null", '{"group": 0}', "\x00", '{"group":-1}', "[" * 2000)
"""Requests from a client that is no group of this run."""

SLOWEST = 9.0
"""Largest factor by which a slow group is slower than others."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `at` seconds from the start, of a `kind` in BREAKERS. `group` and `rank` are indices, modulo the
    number of living groups and of its ranks. `size`, from 0 to 1: how long, late or much, in the kind's own range."""

    at: float
    kind: str
    group: int
    rank: int
    size: float


def place(
    chance: random.Random, kinds: Sequence[str], count: int, groups: int, ranks: int, quiet_s: float
) -> tuple[Fault, ...]:
    """Draw `count` faults of these kinds after `quiet_s` seconds, up to 12 s apart, some of them in bursts."""
    at, placed = quiet_s + chance.uniform(0.5, 8.0), []
    weights = [WEIGHTS.get(kind, 1.0) for kind in kinds]
    for _ in range(count):
        kind = chance.choices(kinds, weights)[0]
        placed.append(Fault(at, kind, chance.randrange(groups), chance.randrange(ranks), chance.random()))
        at += chance.choice([0.1, 3.0, 12.0]) * chance.random()
    return tuple(placed)


class NothingToBreak(Exception):
    """The fault has nothing to break now."""


def break_it(world: World, fault: Fault) -> None:
    """Let a fault happen, if there is something to break and DEADLY faults would leave a state."""
    lives = world.lives()
    if not lives:
        return
    life = lives[fault.group % len(lives)]
    if fault.kind in DEADLY and not _spare(world, life):
        return
    try:
        BREAKERS[fault.kind](world, life, life.ranks[fault.rank % life.size], fault.size)
    except NothingToBreak:
        return
    world.fell[fault.kind] += 1
    world.note("FAULT", fault.kind, None, {"group": life.name, "rank": fault.rank, "size": round(fault.size, 3)})
    world.disturbed()


def _only_if(holds: object) -> None:
    if not holds:
        raise NothingToBreak


def _spare(world: World, life: Life) -> bool:
    """Return whether another group has a state, so that the run need not go back if this one dies."""
    return any(other is not life for other in world.with_state())


def _another(world: World, life: Life) -> Life:
    others = [other for other in world.lives() if other is not life]
    _only_if(others)
    return world.scheduler.random.choice(others)


def _kill_at_await(world: World, life: Life, rank: Rank, size: float) -> None:
    """One rank dies at one of its next 60 waits."""
    rank.process.die_after = 1 + int(size * 60)
    world.disturbed(world.scheduler.now + 5.0)


def _kill_at_vote(world: World, life: Life, rank: Rank, size: float) -> None:
    """One rank dies between its next tally and the commit."""
    rank.dies_at_vote = True
    world.disturbed(world.scheduler.now + 5.0)


def _kill_group(world: World, life: Life, rank: Rank, size: float) -> None:
    if size < 0.2:  # the host with its snapshots
        life.group.keeper.clear()
    life.end()


def _kill_all(world: World, life: Life, rank: Rank, size: float) -> None:
    """The groups die 0 to 0.1 s apart. The disk is left, and mostly the snapshots."""
    for place, each in enumerate(world.lives()):
        world.scheduler.call_in(0.1 * size * place, each.end)
        if size < 0.15:
            each.group.keeper.clear()


def _stop_group(world: World, life: Life, rank: Rank, size: float) -> None:
    for each in life.ranks:
        world.stop(each.process, 1.0 + 19.0 * size**2)


def _last_message(world: World, life: Life, rank: Rank, size: float) -> None:
    """The last message of a sum does not reach one rank."""
    _only_if(rank.sums is not None and rank.sums.size > 0)
    rank.process.lose_next = True


def _heal_fails(world: World, life: Life, rank: Rank, size: float) -> None:
    """The next transfer of a state breaks off."""
    world.network.breaks_off = True


def _lighthouse(world: World) -> LighthouseNode:
    node = world.lighthouses[world.published]
    _only_if(node.process.alive)
    return node


def _lighthouse_out(world: World, life: Life, rank: Rank, size: float) -> None:
    """The lighthouse dies and comes back at its address, without memory."""
    node, away_s = _lighthouse(world), 0.1 + 15.0 * size**2
    _only_if(not node.process.stopped)
    node.process.kill()
    world.scheduler.call_in(away_s, node.start)
    world.disturbed(world.scheduler.now + away_s)


def _lighthouse_frozen(world: World, life: Life, rank: Rank, size: float) -> None:
    node = _lighthouse(world)
    _only_if(not node.process.stopped)
    world.stop(node.process, 0.5 + 15.0 * size**2)


def _lighthouse_moved(world: World, life: Life, rank: Rank, size: float) -> None:
    """The lighthouse dies. Another one is started on another host."""
    away_s = 0.5 + 10.0 * size
    _lighthouse(world).process.kill()
    world.scheduler.call_in(away_s, world.move_lighthouse)
    world.disturbed(world.scheduler.now + away_s)


def _lighthouse_double(world: World, life: Life, rank: Rank, size: float) -> None:
    """A second lighthouse is published. The first lives on for up to 30 s, until it sees that it is the older one."""
    node = _lighthouse(world)
    world.move_lighthouse()
    if size > 0.5:
        node.process.stop(20.0 * (size - 0.5))
    world.scheduler.call_in(30.0 * size, lambda: node.process.kill())
    world.disturbed(world.scheduler.now + 30.0 * size)


def _late_beats(world: World, life: Life, rank: Rank, size: float) -> None:
    """Nothing from a group reaches the lighthouse for 1 to 10 s."""
    world.network.lose([(life.host, world.lighthouses[world.published].host)], 1.0 + 9.0 * size)
    world.disturbed(world.scheduler.now + 10.0)


def _leave(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group is asked to leave. Its ranks hear of it within half a second."""
    _only_if([other for other in world.with_state() if other is not life and other.group.wanted])
    _ask_to_leave(world, life)
    if size < 0.6:  # it comes back, without a state
        world.sessions += 1

        def back() -> None:
            world.sessions -= 1
            if life.group.life is not None and not life.group.life.ended:
                life.group.life.end()
            if not world.finishing():
                world.add_group(life.group.id)

        world.scheduler.call_in(5.0 + 20.0 * size, back)


def _ask_to_leave(world: World, life: Life) -> None:
    life.group.wanted = False
    for each in life.ranks:
        each.leave_at = min(each.leave_at, world.scheduler.now + world.scheduler.random.uniform(0.0, 0.5))


def _join(world: World, life: Life, rank: Rank, size: float) -> None:
    _only_if(len(world.groups) <= world.plan.groups + 1 and not world.finishing())
    world.add_group(max(world.groups) + 1)


def _join_odd(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group joins that has another number of ranks than all others, as an option of `everstep agent` can cause."""
    _join(world, life, rank, size)
    world.groups[max(world.groups)].ranks = 1 + world.plan.ranks % 2


def _join_at_vote(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group joins, and asks for a quorum just when others vote."""
    _join(world, life, rank, size)
    world.groups[max(world.groups)].asks_at_vote = True


def _stop_all(world: World, life: Life, rank: Rank, size: float) -> None:
    """The run is asked to stop, and is started again later with 1 to 4 groups."""
    _only_if(not world.sessions and not world.finishing())
    world.sessions += 1
    for each in world.lives():
        _ask_to_leave(world, each)
    for group in world.groups.values():
        group.wanted = False

    def again() -> None:
        if any(not each.ended for group in world.groups.values() for each in group.lives):
            world.scheduler.call_in(1.0, again)
            return
        world.sessions -= 1
        for group in world.groups.values():
            group.forget_beat()  # a new start of the run removes what the last one left
        for number in range(1 + int(size * 3.99)):
            world.add_group(number)
        world.disturbed()

    world.scheduler.call_in(1.0, again)


def _flip(world: World, life: Life, rank: Rank, size: float) -> None:
    """A rank's parameters change without the protocol noticing. An audit can see it."""
    sound = [other for other in world.with_state() if not other.group.suspicious]
    _only_if(world.plan.audit_every and life in sound and len(sound) >= 3)
    rank.work.flip()
    life.group.suspicious = True
    for group in world.groups.values():
        group.named = False  # by an audit before this, which saw nothing of it


def _refuse(world: World, life: Life, rank: Rank, size: float) -> None:
    """A check refuses the next slots of a group."""
    _only_if(world.plan.may_refuse)
    world.refusing[life.group.id] = 1 if world.plan.audit_slots else 1 + int(2 * size)


def _sick(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group computes one slot or all slots wrongly from now on: with a finite error, or not finite."""
    others = [other for other in world.groups if other != life.group.id and other not in world.sick]
    _only_if(world.plan.may_refuse and others)
    slots, chance = range(world.plan.slots), random.Random(size)
    world.sick[life.group.id] = Sick(frozenset([chance.choice(slots)] if size < 0.7 else slots), chance.random() < 0.6)


def _data(world: World, life: Life, rank: Rank, size: float) -> None:
    """One slot has numbers for which the bound of a check is too narrow, or that are not finite, on every group. It is
    of a step that no group has begun, because the numbers of a step do not change while it is being made."""
    _only_if(world.plan.may_refuse)
    begun = max(rank.work.state.step for life in world.lives() for rank in life.ranks if rank.work is not None) + 1
    (world.narrow if size % 0.1 < 0.05 else world.infinite).add((begun + 1, int(size * world.plan.slots)))


def _not_finite(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group's next gradient is not finite, or its next two if it is the only group."""
    _only_if(not world.spoiling)
    world.spoiling[life.group.id] = 1 + (len(world.groups) == 1 and size > 0.5)


def _stray(world: World, life: Life, rank: Rank, size: float) -> None:
    """A client that has the token, but is no group of this run, asks the lighthouse now and then for 1 to 10 s."""
    until = world.scheduler.now + 1.0 + 9.0 * size
    said = {"replica": f"{rank.number}:stray", "said": STRAYS[int(size * len(STRAYS))], "timeout_s": 5.0}
    process = Process(world.scheduler, "stray", "stray")

    def ask() -> None:
        while world.scheduler.now < until:
            try:
                at = world.published.removeprefix("http://")
                real.wire.connect(at, TOKEN, timedelta(seconds=5), purpose=real.membership.PURPOSE).ask(said)
            except real.wire.WireError:
                pass
            world.scheduler.sleep(0.7)

    world.scheduler.spawn(process, ask)
    world.disturbed(until)


def _twin(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group is started a second time while its old processes still live, some of them stopped."""
    _only_if(_spare(world, life) and life.group.wanted)
    if size < 0.7:
        for each in life.ranks[: 1 + int(size * life.size)]:
            world.stop(each.process, 0.5 + 20.0 * size)
    life.group.start()


def _slow(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group computes up to SLOWEST times slower from now on, or at its normal speed again."""
    world.slow[life.group.id] = 1.0 if size < 0.3 else 1.0 + (SLOWEST - 1.0) * size


def _lasts_s(size: float) -> float:
    """Return how many seconds a fault of the network lasts: 1 to 40, mostly few."""
    return 1.0 + 39.0 * size**2


def _lose(ways: Callable[[World, Life], Sequence[tuple[str, str]]]) -> Callable[[World, Life, Rank, float], None]:
    """Return a breaker: nothing passes on these ways for a while. Groups on other ways must go on meanwhile."""

    def breaker(world: World, life: Life, rank: Rank, size: float) -> None:
        seconds = _lasts_s(size)
        world.network.lose(ways(world, life), seconds)
        world.scheduler.call_in(seconds, world.disturbed)

    return breaker


def _around(life: Life, hosts: Iterable[str]) -> list[tuple[str, str]]:
    """Return all ways between a group and some hosts, in both directions."""
    return [way for host in hosts if host != life.host for way in ((life.host, host), (host, life.host))]


def _hosts(world: World) -> list[str]:
    return [f"h{number}" for number in sorted(world.groups)]


def _closed(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group loses its connections to others. For a while no new ones can be made, or if it is short no sums."""
    seconds = _lasts_s(size)
    world.network.close(_around(life, _hosts(world)), seconds, communicators_only=size < 0.5)
    for host in _hosts(world):
        world.network.reset(life.host, host)
    world.scheduler.call_in(seconds, world.disturbed)


def _slow_link(world: World, life: Life, rank: Rank, size: float) -> None:
    """Messages between two groups take 0.02 to 0.52 s longer for a while."""
    ways, seconds = _around(life, [_another(world, life).host]), _lasts_s(size)
    world.network.delay(ways, 0.02 + 0.5 * world.scheduler.random.random(), seconds)
    world.disturbed(world.scheduler.now + seconds)


def _dark(world: World, life: Life, rank: Rank, size: float) -> None:
    """A group's host loses power, and closes no connection."""
    world.network.dark.add(life.host)
    life.end()


def _lighthouse_dark(world: World, life: Life, rank: Rank, size: float) -> None:
    """The lighthouse's host falls silent for a while. In half of the cases another one is published meanwhile."""
    node, seconds, hosts = _lighthouse(world), _lasts_s(size), _hosts(world)
    world.network.lose([way for host in hosts for way in ((host, node.host), (node.host, host))], seconds)
    if world.scheduler.random.random() < 0.5:
        seconds *= world.scheduler.random.random()
        world.scheduler.call_in(seconds, world.move_lighthouse)
    world.disturbed(world.scheduler.now + seconds)


def _lag(world: World, life: Life, rank: Rank, size: float) -> None:
    """For a while, a host sees the writes of others to the run directory 0.5 to 30 s late."""
    seconds, late_s = _lasts_s(world.scheduler.random.random()), 0.5 + 29.5 * size**2
    world.lags[life.host].append((world.scheduler.now + seconds, late_s))
    world.disturbed(world.scheduler.now + seconds)


BREAKERS: dict[str, Callable[[World, Life, Rank, float], None]] = {
    "kill": lambda world, life, rank, size: rank.process.kill(),  # its agent ends the others
    "await": _kill_at_await, "group": _kill_group, "all": _kill_all,
    "stop": lambda world, life, rank, size: world.stop(rank.process, 1.0 + 29.0 * size**2),
    "stop-group": _stop_group,
    "hang": lambda world, life, rank, size: world.stop(rank.process, 200.0),  # until the watchdog ends the group
    "lose": _last_message,
    "cut": lambda world, life, rank, size: world.network.reset(life.host, _another(world, life).host),
    "heal": _heal_fails, "lh-out": _lighthouse_out, "lh-freeze": _lighthouse_frozen, "lh-move": _lighthouse_moved,
    "lh-double": _lighthouse_double, "beats": _late_beats, "leave": _leave, "join": _join,
    "stop-all": _stop_all, "flip": _flip, "refuse": _refuse, "nan": _not_finite, "stray": _stray,
    "twin": _twin, "slow": _slow,
    "part": _lose(lambda world, life: _around(life, [_another(world, life).host])),
    "one-way": _lose(lambda world, life: [(life.host, _another(world, life).host)]),
    # "unreached": cut off from all other groups but not from the lighthouse. "gone": cut off from both.
    "unreached": _lose(lambda world, life: _around(life, _hosts(world))),
    "gone": _lose(lambda world, life: _around(life, [*_hosts(world), world.lighthouses[world.published].host])),
    "closed": _closed, "slow-link": _slow_link, "dark": _dark, "lh-dark": _lighthouse_dark, "fs-lag": _lag,
    "sick": _sick, "data": _data, "vote": _kill_at_vote, "join-vote": _join_at_vote,
    "join-odd": _join_odd,
    # No group can write the last checkpoint, the first one or two times that it tries.
    "full": lambda world, life, rank, size: world.full.update(dict.fromkeys(world.groups, 1 + int(2 * size))),
}  # fmt: skip
DEADLY = ("kill", "await", "vote", "group", "hang", "dark")
"""Faults that end a group. They do not hit the last one with a state."""
CLOSING = ("kill", "await", "group", "all", "cut", "heal", "lh-out", "join", "flip", "refuse", "nan", "slow")
"""Faults that silence nobody: all processes that die close their connections."""
REFUSALS = ("refuse", "sick", "data")
AT_VOTE = ("vote", "join-vote")
KINDS = tuple(kind for kind in BREAKERS if kind not in (*REFUSALS[1:], "join-odd", "full", *AT_VOTE))
"""The kinds that are drawn by default."""
WEIGHTS = {
    "flip": 2.0, "kill": 3.0, "await": 5.0, "stop": 2.0, "lose": 3.0, "cut": 2.0, "lh-out": 2.0, "all": 0.7,
    "hang": 0.3, "stop-all": 0.5,
}  # fmt: skip
