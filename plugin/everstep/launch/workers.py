"""The workers of one node of a group: forked, watched, killed.

They are children of a fork point (`everstep.launch.forking`), which says how each ended, in the order of their deaths.
They die with it, and it with its agent.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.launch.forking import ForkPoint

ANSWER_TIMEOUT_S = 120.0
"""For a fork point to fork, and for what was killed to end: the kernel may have much memory to give back."""


class ForkPointDied(RuntimeError):
    """Nobody else can be started: the agent has threads of its own by now. `exitcode`: how it ended."""

    def __init__(self, exitcode: int):
        super().__init__("the fork point of this agent has died; a new agent has to take over")
        self.exitcode = exitcode


@dataclass(frozen=True)
class Request:
    """A rank's process: it calls `run` ("module:function") with `args` (JSON), and has `env` besides the agent's."""

    rank: int
    run: str
    args: list
    log: Path
    env: dict[str, str]


@dataclass(frozen=True)
class Ended:
    """A rank's process that is no more. `exitcode` as multiprocessing gives it: negative for a signal."""

    rank: int
    pid: int
    exitcode: int


class Workers:
    """One node's processes, one incarnation after the other."""

    def __init__(self, fork_point: ForkPoint):
        self.pids: dict[int, int] = {}
        """By rank, of the newest incarnation, also those that have ended."""
        self.ended: list[Ended] = []
        """Of these, in the order of their deaths."""
        self._fork_point = fork_point
        self._asked: dict[int, int] = {}
        self._answers = select.poll()
        self._answers.register(fork_point, select.POLLIN)

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return sorted(self.pids.keys() - {one.rank for one in self.ended})

    def start(self, requests: Sequence[Request]) -> None:
        """A new incarnation, once nobody runs. Raises ForkPointDied, or RuntimeError when the fork point does not
        answer."""
        self.pids, self.ended = {}, []
        self._fork_point.reap()
        for one in requests:
            self._asked[self._fork_point.fork(one.run, one.args, one.log, one.env)] = one.rank
        self._until(lambda: self._fork_point.gone or len(self.pids) == len(requests))
        if self._fork_point.gone:
            raise ForkPointDied(self._fork_point.exitcode())

    def wait(self, timeout_s: float) -> None:
        """Until another one has ended, or for so long."""
        if self._answers.poll(timeout_s * 1000):
            self._hear()

    def signal(self, signum: signal.Signals, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                os.kill(self.pids[rank], signum)
            except ProcessLookupError:
                continue

    def stop(self) -> None:
        """Kill all that run, and wait until they are gone. Raises RuntimeError when the kernel keeps one."""
        self.signal(signal.SIGKILL, self.running)
        self._until(lambda: not self.running)

    def _until(self, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not over():
            self.wait(max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                kept = [self.pids[rank] for rank in self.running]
                self._write_off()
                raise RuntimeError(
                    f"the fork point of this agent has said nothing for {ANSWER_TIMEOUT_S:g} s of the workers {kept}; "
                    "a new agent has to take over"
                )

    def _write_off(self) -> None:
        """Nothing more will be heard of those that run; they die with the fork point."""
        self._asked = {}
        self.ended += [Ended(rank, self.pids[rank], -signal.SIGKILL) for rank in self.running]

    def _hear(self) -> None:
        for answer in self._fork_point.answers():
            if "id" in answer:
                self.pids[self._asked.pop(answer["id"])] = answer["pid"]
            else:
                rank = next(rank for rank, pid in self.pids.items() if pid == answer["pid"])
                self.ended.append(Ended(rank, answer["pid"], answer["exitcode"]))
        if self._fork_point.gone:
            self._answers.unregister(self._fork_point)
            self._write_off()
