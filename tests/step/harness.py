"""Runs of a few groups of real processes, for tests of the protocol."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import member
from everstep.launch.machine import free_port
from everstep.run.events import read_events
from member import MODULUS

DEADLINE_S = 60
ENDLESS = 1_000_000


class Rank:
    """A running rank; `commits` grows as it reports them."""

    def __init__(self, context, options: member.Options) -> None:
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=member.main, args=(options, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.commits: dict[int, dict] = {}
        self.order_of_commits: list[int] = []
        self.end = ""

    def _receive(self) -> object:
        if not self._connection.poll(DEADLINE_S):
            raise TimeoutError(f"nothing from the group for {DEADLINE_S} s after step {max(self.commits, default=0)}")
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise AssertionError(f"the group ended with {self.process.exitcode}") from None

    def _note(self, word: object) -> None:
        if isinstance(word, dict):
            self.commits[word["step"]] = word
            self.order_of_commits.append(word["step"])
        else:
            self.end = word

    def until(self, step: int) -> dict:
        while step not in self.commits:
            self._note(self._receive())
            assert not self.end, f"the group was done before step {step}: {self.end}"
        return self.commits[step]

    def beyond(self, step: int) -> None:
        """Wait for its commit of `step` or, where it healed past that, of a later one."""
        while max(self.commits, default=0) < step:
            self._note(self._receive())
            assert not self.end, f"the group was done before step {step}: {self.end}"

    def first(self) -> int:
        """Wait for its first commit; the step."""
        while not self.commits:
            self._note(self._receive())
        return min(self.commits)

    def catch_up(self, seconds: float = 0.0) -> None:
        """Take note of what it said so far and says within so many seconds."""
        until = time.monotonic() + seconds
        while self._connection.poll(max(until - time.monotonic(), 0)):
            try:
                self._note(self._connection.recv())
            except (EOFError, ConnectionResetError):
                return

    def kill(self) -> None:
        """Also of one that is stopped, which otherwise dies late, and of one that just ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.join()

    def death(self) -> int:
        self.process.join(DEADLINE_S)
        return self.process.exitcode


class Run:
    """A lighthouse and the groups of a test."""

    def __init__(self, run_dir: Path, context, **lighthouse: float | str) -> None:
        self.run_dir = run_dir
        self.port, self.host = 0, lighthouse.get("host", "127.0.0.1")
        self.timeouts = lighthouse
        self._context = context
        self.members: list[Rank] = []
        self.start_lighthouse()

    def start_lighthouse(self) -> None:
        connection, theirs = self._context.Pipe()
        self.lighthouse = self._context.Process(
            target=member.lighthouse,
            args=(self.port, theirs),
            kwargs=self.timeouts,
            daemon=True,
        )
        self.lighthouse.start()
        assert connection.poll(DEADLINE_S)
        self.port = connection.recv()

    def kill_lighthouse(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.join()

    def group(self, number: int, *, steps: int, **options: object) -> Rank:
        return self.ranks(number, 1, steps=steps, **options)[0]

    def ranks(self, number: int, ranks: int, *, steps: int, **options: object) -> list[Rank]:
        port, group = free_port(), []
        for rank in range(ranks):
            group.append(
                Rank(
                    self._context,
                    member.Options(
                        group=number,
                        rank=rank,
                        ranks=ranks,
                        store_port=port,
                        lighthouse=f"http://{self.host}:{self.port}",
                        run_dir=self.run_dir,
                        steps=steps,
                        **options,
                    ),
                )
            )
        self.members += group
        return group

    def order(self, group: int, rank: int, phase: str, do: str) -> None:
        """Have a rank kill or stop itself when it comes to a phase next."""
        path = self.run_dir / f"order-{group}-{rank}"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({"phase": phase, "do": do}))
        draft.rename(path)

    def carried_out(self, group: int, rank: int) -> None:
        """Wait until an order was met."""
        done, deadline = self.run_dir / f"order-{group}-{rank}.done", time.monotonic() + DEADLINE_S
        while not done.exists():
            assert time.monotonic() < deadline, "the rank never came to that phase"
            time.sleep(0.02)

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_events(self.run_dir) if event["kind"] == kind]

    def close(self) -> None:
        for rank in self.members:
            rank.kill()
        self.kill_lighthouse()


def expected(step: int, slots: int) -> list[float]:
    """The state after `step` of the run in which nothing failed."""
    steps, numbers = step * (step + 1) // 2, slots * (slots - 1) // 2
    return [float(total % MODULUS) for total in (slots * step, numbers * step, slots * steps, numbers * steps)]


def check_states(group: Rank, slots: int = 6) -> None:
    """Every step that the group committed so far has the failure-free state, and it committed each once."""
    group.catch_up()
    for step, commit in group.commits.items():
        assert commit["state"] == expected(step, slots), f"step {step}"
        assert commit["tokens"] == 10.0 * slots
    assert group.order_of_commits == sorted(set(group.order_of_commits))


def newest(ranks: list[Rank]) -> int:
    """The newest step that one of them committed."""
    for rank in ranks:
        rank.catch_up()
    return max(max(rank.commits, default=0) for rank in ranks)
