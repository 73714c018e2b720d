"""Runs of a few groups of real processes, for tests of the protocol."""

import json
import subprocess
import sys
from pathlib import Path

from everstep.launch.machine import free_port
from everstep.run.events import EventTail
from forked import Forked
from member import MODULUS
from watched import environment, of_kind, until

DEADLINE_S = 60
WAITS = {
    "heartbeat_timeout_s": 0.5, "connect_timeout_s": 2.0, "reduce_timeout_s": 5.0, "quorum_timeout_s": 5.0,
    "join_timeout_s": 30.0, "stall_timeout_s": 25.0, "startup_timeout_s": 15.0,
}  # fmt: skip
"""A rank's [fault_tolerance] settings, unless a test passes others."""


class Rank:
    """A running rank. `commits`: step → its event `applied`. The steps must come once each and in order."""

    def __init__(self, run: "Run", process: Forked) -> None:
        self.run, self.process = run, process
        self.commits: dict[int, dict] = {}

    def beyond(self, step: int = 0) -> None:
        """Wait until the rank has committed `step`, or a later one if it healed past `step`."""

        def is_there() -> bool:
            ended = self.process.poll()
            self.run.take()
            there = max(self.commits, default=-1) >= step
            assert there or ended is None, f"the group ended with {ended}"
            return there

        until(is_there, f"step {step} after {max(self.commits, default=0)}", DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Run:
    """The lighthouse and the groups of a test. `host`, `namespace`: the lighthouse's. `lighthouse`: its timeouts."""

    def __init__(self, run_dir: Path, *, host: str = "127.0.0.1", namespace: str = "", **lighthouse: float) -> None:
        self.run_dir, self._tail, self._seen = run_dir, EventTail(run_dir), []
        self.members: dict[tuple[int, int], Rank] = {}
        self.address, self._namespace = f"{host}:{free_port()}", namespace
        waits = {"join_timeout_s": 30.0, "heartbeat_timeout_s": 0.5} | lighthouse
        self._waits = [word for key, value in waits.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        self.start_lighthouse()

    def _start(self, *words: str, **env: str) -> Forked:
        command, env = [sys.executable, "-m", "member", *words], environment(RUST_LOG="warn", **env)
        return Forked(command, stdout=subprocess.PIPE if words[0] == "lighthouse" else None, env=env)

    def start_lighthouse(self) -> None:
        words = "lighthouse", "--bind", self.address, "--run-dir", str(self.run_dir), *self._waits
        self.lighthouse = self._start(*words, EVERSTEP_TEST_NAMESPACE=self._namespace)
        assert self.lighthouse.stdout.readline(), "it says when it serves"

    def kill_lighthouse(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.wait()

    def ranks(self, number: int, ranks: int, *, host: str = "", namespace: str = "", **options: object) -> list[Rank]:
        """Start a group of `ranks` processes. `options`: fields of `member.Options`, and of WAITS to replace."""
        own = {name: options.pop(name) for name in WAITS.keys() & options.keys()}
        host = host or f"127.0.0.{10 + number}"
        own |= {"group_id": number, "bind_host": host, "lighthouse": f"http://{self.address}"}
        told = json.dumps({"run_dir": str(self.run_dir), "settings": WAITS | own, **options})
        place = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        for rank in range(ranks):
            process = self._start(told, RANK=str(rank), EVERSTEP_TEST_NAMESPACE=namespace, **place)
            self.members[number, rank] = Rank(self, process)
        return [self.members[number, rank] for rank in range(ranks)]

    def order(self, group: int, rank: int, phase: str, do: str) -> None:
        """Let a rank kill or stop itself when it next enters a phase, and wait until it has."""
        path = self.run_dir / f"order-{group}-{rank}"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({"phase": phase, "do": do}))
        draft.rename(path)
        until(path.with_suffix(".done").exists, f"the rank in {phase}", DEADLINE_S)

    def take(self) -> None:
        """Read the events that were written since the last call."""
        for event in self._tail.new():
            self._seen.append(event)
            if event["kind"] == "applied":
                commits = self.members[event["group"], event["rank"]].commits
                assert event["step"] > max(commits, default=0)
                commits[event["step"]] = event

    def events(self, kind: str) -> list[dict]:
        self.take()
        return of_kind(self._seen, kind)

    def close(self) -> None:
        for rank in self.members.values():
            rank.kill()
        self.kill_lighthouse()


def expected(step: int, slots: int) -> list[float]:
    """Return the state after `step` of a run without failures."""
    steps, numbers = step * (step + 1) // 2, slots * (slots - 1) // 2
    return [float(total % MODULUS) for total in (slots * step, numbers * step, slots * steps, numbers * steps)]


def check_states(group: Rank, slots: int = 6) -> None:
    """Assert that the state after every step that this rank committed is that of a run without failures."""
    group.run.take()
    for step, commit in group.commits.items():
        assert commit["state"] == expected(step, slots), f"step {step}"
        assert commit["tokens"] == 10.0 * slots


def newest(ranks: list[Rank]) -> int:
    """Return the newest step that any of these ranks committed."""
    ranks[0].run.take()
    return max(max(rank.commits, default=0) for rank in ranks)
