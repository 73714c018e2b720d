"""The ranks of one group, exhaustively: the real StepProtocol on each of them, and every combination of what can come
of its calls between groups.

Between two decisions of the group a rank sees nothing of the others, so the order in which the ranks run does not
matter; what matters is what each of them sees. Each run follows a script of choices, and all scripts within a bound
on attempts and deaths are tried, by going back to the last choice that has an alternative left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from everstep.step.attempt import Group, Host, Peers, Rules, Turn
from everstep.step.interfaces import Commit, GroupBroken, OutOfData, QuorumUnavailable, SlotSums, SumsBroken, Timeouts
from everstep.step.ledger import Row, Tally
from everstep.step.protocol import StepProtocol
from everstep.step.quorum import Member, Request

SLOTS = 2
OK, FAILS, KILL = "comes", "fails", "kill"
DIED, BROKEN = "died", "broken"


class Died(BaseException):
    """This rank is killed here."""


@dataclass
class Script:
    """The choices of one run: those given, then always the first."""

    given: list[int]
    taken: list[tuple[int, int]] = field(default_factory=list)
    """Choice and number of alternatives, in order."""

    def choose(self, options: Sequence[str]) -> str:
        place = len(self.taken)
        choice = self.given[place] if place < len(self.given) else 0
        self.taken.append((choice, len(options)))
        return options[choice]

    def next(self) -> list[int] | None:
        """What to try next: the last choice that has an alternative is changed."""
        taken = list(self.taken)
        while taken:
            choice, options = taken.pop()
            if choice + 1 < options:
                return [before for before, _ in taken] + [choice + 1]
        return None


class OneGroup:
    """A group of `size` ranks beside one other group, which does whatever the script says."""

    def __init__(
        self, script: Script, size: int, attempts: int, deaths: int, protocol: Any, *, data_ends: bool
    ) -> None:
        self.script, self.size, self.attempts, self.protocol = script, size, attempts, protocol
        self.deaths_left, self.data_ends = deaths, data_ends
        self.turns: list[list[Commit | Turn | str]] = [[] for _ in range(size)]
        self.problem = ""
        self.hub = getcurrent()

    def meet(self, rank: int, signature: tuple[Any, ...], value: Any) -> list[Any]:
        """A collective of the group."""
        answer = self.hub.switch((rank, signature, value))
        if isinstance(answer, GroupBroken):
            raise answer
        return answer

    def outcome(self) -> str:
        """Of something between groups, at one rank."""
        options = [OK, FAILS]
        if self.deaths_left:
            options.append(KILL)
        choice = self.script.choose(options)
        if choice == KILL:
            self.deaths_left -= 1
            raise Died
        return choice

    def run(self, attempts: int) -> None:
        ranks = [greenlet(_Rank(self, number).run) for number in range(self.size)]
        waiting = {number: rank.switch(attempts) for number, rank in enumerate(ranks)}
        while any(not rank.dead for rank in ranks):
            gone = [number for number, rank in enumerate(ranks) if rank.dead]
            if gone:
                # A rank that has ended answers no collective: whoever is in one or comes to one ends.
                if not any(self.turns[number][-1:] in ([DIED], [BROKEN]) for number in gone):
                    at = {number: waiting[number][1] for number, rank in enumerate(ranks) if not rank.dead}
                    self.problem = self.problem or f"ranks {gone} are done while others wait: {at}"
                for number, rank in enumerate(ranks):
                    if not rank.dead:
                        waiting[number] = rank.switch(GroupBroken("a rank is gone"))
                continue
            signatures = {waiting[number][1] for number in range(self.size)}
            if len(signatures) > 1:
                self.problem = f"ranks are at different calls: {sorted(map(str, signatures))}"
                for rank in ranks:
                    rank.switch(GroupBroken("unpaired"))
                continue
            values = [waiting[number][2] for number in range(self.size)]
            for number, rank in enumerate(ranks):
                waiting[number] = rank.switch(values)


class _Rank:
    """One rank. It is most of what its protocol is given; `_Sums` and `_Ranks` are the rest."""

    def __init__(self, group: OneGroup, number: int) -> None:
        self.group, self.rank, self.size = group, number, group.size
        self.address, self.attempt = f"door-{number}", 0
        self.done: set[int] = set()

    def run(self, attempts: int) -> None:
        turns = self.group.turns[self.rank]
        sums = _Sums(self)
        try:
            waits = (timedelta(seconds=1) for _ in range(5))
            protocol = self.group.protocol(
                group=Group(0, "a", "here", _Ranks(self)),
                rules=Rules(SLOTS, "redistribute", Timeouts(*waits)),
                work=self,
                reducer=self,
                peers=Peers(self if self.rank == 0 else None, sums, self),
                host=Host(self, self, self),
            )
            protocol.restored(0, 0)
            # The last attempt has no choices: whatever came before, it commits.
            for self.attempt in range(attempts + 1):
                turn = protocol.attempt()
                turns.append(turn)
                if isinstance(turn, Commit):
                    protocol.apply(turn)
                if turn is Turn.OUT_OF_DATA:
                    break
        except Died:
            turns.append(DIED)
        except GroupBroken:
            turns.append(BROKEN)

    def outcome(self) -> str:
        return self.group.outcome() if self.attempt < self.group.attempts else OK

    # Clock, Events, RunFiles
    def now(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None: ...

    def emit(self, kind: str, step: int | None = None, **fields: Any) -> None: ...

    def beat(self, phase: str, step: int) -> None: ...

    def fenced(self) -> bool:
        return False

    def asked_to_leave(self) -> bool:
        return False

    def ended_for_all(self) -> bool:
        return False

    def finished_step(self) -> int:
        return -1

    # HealDoor
    def close(self) -> None: ...

    # Membership
    def follow(self) -> bool:
        return False

    def ask(self, request: Request, timeout: timedelta) -> tuple[int, list[Member]]:
        if self.outcome() == FAILS:
            raise QuorumUnavailable("a choice")
        return 1, [request, replace(request, group=1, life="b")]

    # Work
    def discard(self) -> None:
        self.done.clear()

    def compute(self, step: int, slot: int, *, whole: bool) -> None:
        self.group.meet(self.rank, ("compute", step, slot), None)
        if self.group.data_ends and step == 2:
            raise OutOfData
        self.done.add(slot)

    def refused(self) -> frozenset[int]:
        return frozenset()

    def results(self) -> SlotSums:
        self.group.meet(self.rank, ("results",), None)
        tokens = torch.zeros(SLOTS, dtype=torch.float64)
        return SlotSums(tokens, tokens, torch.zeros(0, dtype=torch.float64), frozenset(self.done))

    def settle(self) -> None: ...

    def notes(self, step: int) -> None:
        return None

    def checksum(self) -> None:
        return None

    def apply(self, commit: Commit) -> None:
        self.group.meet(self.rank, ("apply", commit.step, commit.history), None)

    # Reducer
    def begin(self, sums: Any, timeout: timedelta, step: int = 0) -> None: ...

    def begin_slot(self, *, last: bool) -> None: ...

    def end_slot(self) -> None: ...

    def forget(self) -> None: ...

    def finish(self) -> None:
        if self.outcome() == FAILS:
            raise SumsBroken("a choice")

    def finite(self) -> bool:
        return True

    def own_finite(self) -> bool:
        return True


class _Ranks:
    """The group's own collectives."""

    def __init__(self, rank: _Rank) -> None:
        self._rank, self.rank, self.size = rank, rank.rank, rank.size

    def broadcast(self, payload: bytes) -> bytes:
        return self._rank.group.meet(self.rank, ("broadcast",), payload)[0]

    def gather(self, words: Sequence[int]) -> list[list[int]]:
        return [list(answer) for answer in self._rank.group.meet(self.rank, ("gather", len(words)), tuple(words))]


class _Sums:
    """Sums with the other group, which is where this one is and computes what this one does not."""

    def __init__(self, rank: _Rank) -> None:
        self._rank, self.connected = rank, False
        self.address, self._unreached = f"watch-{rank.rank}", frozenset()

    def unreached(self) -> frozenset[str]:
        """What could not be connected to; not the same on every rank."""
        return self._unreached

    def connect(self, *, key: str, store: str, host: int, rank: int, peers: Sequence[str]) -> None:
        self._unreached = frozenset(peers) - {self.address}
        self._try()
        self._unreached = frozenset()
        self.connected = True

    def abort(self) -> None:
        self.connected = False

    def gather(self, words: Sequence[int]) -> list[list[int]]:
        self._try()
        return [list(words), replace(Row.decode(words, SLOTS), group=1, held=frozenset()).encode(SLOTS)]

    def total(self, values: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        self._try()
        covered = Tally.decode(values, SLOTS).coverage
        held = frozenset(slot for slot, count in enumerate(covered) if not count)
        tokens = torch.zeros(SLOTS, dtype=torch.float64)
        sums = SlotSums(tokens, tokens, torch.zeros(0, dtype=torch.float64), held)
        return values + Tally.of(1, held, sums, leaving=False, exhausted=False, refused=False).encode()

    def _try(self) -> None:
        if self._rank.outcome() == FAILS:
            raise SumsBroken("a choice")


@dataclass(frozen=True)
class Explored:
    runs: int
    commits: int
    problems: list[str]


def explore(
    size: int, attempts: int, deaths: int, *, data_ends: bool = False, protocol: Any = StepProtocol, most: int = 10**9
) -> Explored:
    """Every script of `attempts` attempts with up to `deaths` deaths; stops after `most` runs or the first problem."""
    given: list[int] | None = []
    runs = commits = 0
    problems: list[str] = []
    while given is not None and runs < most and not problems:
        script = Script(given)
        group = OneGroup(script, size, attempts, deaths, protocol, data_ends=data_ends)
        group.run(attempts)
        runs += 1
        commits += sum(isinstance(turn, Commit) for turn in group.turns[0])
        if problem := group.problem or _verdict(group.turns, data_ends):
            problems.append(f"{problem}; choices {[choice for choice, _ in script.taken]}")
        given = script.next()
    return Explored(runs, commits, problems)


def _verdict(turns: list[list[Commit | Turn | str]], data_ends: bool) -> str:
    """What is wrong with what the ranks of a group went through."""

    def seen(turn: Commit | Turn | str) -> Any:
        return (turn.step, turn.history, turn.owners) if isinstance(turn, Commit) else turn

    ended = any(rank[-1:] in ([DIED], [BROKEN]) for rank in turns)
    lives = [[seen(turn) for turn in rank if turn not in (DIED, BROKEN)] for rank in turns]
    shortest = min(map(len, lives))
    if any(life[:shortest] != lives[0][:shortest] for life in lives):
        return f"the ranks went different ways: {lives}"
    if ended:
        return "" if max(map(len, lives)) - shortest <= 1 else f"a rank went on alone: {lives}"
    if len({len(life) for life in lives}) > 1:
        return f"the ranks made different numbers of attempts: {lives}"
    last = turns[0][-1]
    if not isinstance(last, Commit) and not (data_ends and last is Turn.OUT_OF_DATA):
        return f"an attempt in which nothing fails came to {last}"
    steps = [turn.step for turn in turns[0] if isinstance(turn, Commit)]
    return "" if steps == list(range(1, len(steps) + 1)) else f"committed steps {steps}"
