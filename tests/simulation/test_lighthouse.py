"""Compares the port of torchft's lighthouse with the real one. For a schedule of requests, heartbeats and clients that
give up, both give the same quorums, with the same members, in the same order."""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torchft.coordination import LighthouseClient, LighthouseServer

from simulation.lighthouse import Announced, Lighthouse, Listener, Options

UNIT_S = 0.4
"""Seconds of one tick of a schedule. Timeouts and clients' patience end between two ticks, a fifth of one apart."""
JOIN_UNITS, HEARTBEAT_UNITS = 2.3, 2.5


@dataclass(frozen=True)
class Act:
    """A member's act at a tick: it asks, and gives up after `patience` ticks, or if that is 0 sends a heartbeat."""

    unit: int
    member: str
    patience: float = 0.0


def draw(seed: int) -> tuple[list[Act], int]:
    """Return a schedule and min_replicas. A member asks only if it does not wait for the answer to an earlier request:
    the rules allow two requests at once, but the real clients would race."""
    chance = random.Random(seed)
    members = [f"m{number}" for number in range(chance.randint(2, 5))]
    acts, free_at = [], dict.fromkeys(members, 0.0)
    # Every other schedule is sparse, so that heartbeats time out while a member waits.
    asks, beats = (0.45, 0.75) if seed % 2 else (0.25, 0.3)
    for unit in range(1, 15):
        # The order within a tick matters, so both sides take the acts one after the other.
        for member in chance.sample(members, len(members)):
            draw = chance.random()
            if draw < asks and free_at[member] <= unit:
                patience = chance.choice([0.7, 1.7, 4.7, 7.7])
                acts.append(Act(unit, member, patience))
                free_at[member] = unit + patience + 1
            elif draw < beats:
                acts.append(Act(unit, member))
    return acts, chance.choice([1, 1, 2])


def ported(acts: list[Act], min_replicas: int) -> dict[int, Announced | None]:
    """Return what the port answers to each request, by the request's number."""
    options = Options(min_replicas, JOIN_UNITS * UNIT_S, HEARTBEAT_UNITS * UNIT_S, quorum_tick_s=0.02)
    rules = Lighthouse(options)
    heard: dict[int, Announced | None] = {}
    waiting: dict[int, tuple[float, Listener]] = {}
    steps: list[tuple[float, int, Act | None]] = [(act.unit * UNIT_S, number, act) for number, act in enumerate(acts)]
    last = max(act.unit for act in acts) * UNIT_S + 9 * UNIT_S
    steps += [(tick * options.quorum_tick_s + 0.011, -1, None) for tick in range(round(last / options.quorum_tick_s))]
    for now, number, act in sorted(steps, key=lambda step: (step[0], step[1])):
        for waits, (until, listener) in list(waiting.items()):
            if until <= now:
                rules.cancel(listener)
                del waiting[waits]
        if act is None:
            rules.tick(now)
        elif not act.patience:
            rules.heartbeat(now, act.member)
        else:
            heard[number] = None
            listener = rules.ask(now, act.member, partial(heard.__setitem__, number))
            if heard[number] is None:
                waiting[number] = (now + act.patience * UNIT_S, listener)
    return heard


class Late(Exception):
    """This machine was too busy to keep the schedule's times."""


def observed(acts: list[Act], min_replicas: int) -> dict[int, Announced | None]:
    """Return what torchft's lighthouse answers to each request, by the request's number."""
    heard: dict[int, Announced | None] = {}
    slack_s = 0.1 * UNIT_S

    def ask(client: Any, number: int, act: Act) -> None:
        try:
            quorum = client.quorum(act.member, timedelta(seconds=act.patience * UNIT_S))
        except (TimeoutError, RuntimeError):
            return
        members = tuple(member.replica_id for member in quorum.participants)
        heard[number] = Announced(int(quorum.quorum_id), members)

    join_ms, heartbeat_ms = (round(units * UNIT_S * 1000) for units in (JOIN_UNITS, HEARTBEAT_UNITS))
    waits = {"join_timeout_ms": join_ms, "heartbeat_timeout_ms": heartbeat_ms, "quorum_tick_ms": 20}
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=min_replicas, **waits)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    with ThreadPoolExecutor(len(acts)) as pool, contextlib.ExitStack() as stack:
        stack.callback(server.shutdown)
        begun = time.monotonic()
        for number, act in enumerate(acts):
            # A little apart within a tick, so that they arrive in this order.
            due = begun + act.unit * UNIT_S + 0.006 * sum(a.unit == act.unit for a in acts[:number])
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() - due > slack_s:
                raise Late
            client = LighthouseClient(address, timedelta(seconds=5))
            if not act.patience:
                client.heartbeat(act.member)
                continue
            heard[number] = None
            pool.submit(ask, client, number, act)
        time.sleep(8 * UNIT_S)
    return heard


def compare(seed: int) -> int | None:
    """Return how many requests were answered, or None if this machine was too busy to tell."""
    acts, min_replicas = draw(seed)
    expected = ported(acts, min_replicas)
    found = None
    for _ in range(4):
        with contextlib.suppress(Late):
            found = observed(acts, min_replicas)
            if found == expected:
                return sum(answer is not None for answer in expected.values())
    assert found is None, f"schedule {seed}: {acts}"
    return None


def test_the_port_and_torchft_answer_alike() -> None:
    with ThreadPoolExecutor(6) as pool:
        answered = [count for count in pool.map(compare, range(6)) if count is not None]
    if len(answered) < 3:
        pytest.skip("this machine is too busy for the schedules' times to mean anything")
    assert sum(answered) > 3 * len(answered), "most schedules have quorums"
