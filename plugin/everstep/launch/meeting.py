"""How the agents of a group on several nodes meet. Loaded only by those: it imports torch."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch.distributed import DistNetworkError, TCPStore

from everstep.launch import store as group_store
from everstep.launch.machine import listen
from everstep.launch.rounds import AskedToStop, NodeLost, Round
from everstep.launch.watchdog import Awake
from everstep.run.files import read_json, write_json

POLL_S = 0.1
PEER_BEAT_S = 0.5
PEER_SILENCE_S = 30.0
"""An agent of the group that was there and has said nothing for this long is gone, its node with it perhaps."""
ARRIVAL_S = 900.0
"""How much later than this one another agent of the group may come. Each looks at its node first, which may take some
minutes."""

SILENT = f"the agent on node {{node}} of this group has been silent for {PEER_SILENCE_S:g} s"
FIRST_NODE_GONE = "the agent on node 0 of this group is gone"


class _Calls:
    """Calls on a thread of their own: those of a TCPStore's client do not return while the server's process is stopped,
    or its node without power."""

    def __init__(self) -> None:
        self._asked: SimpleQueue = SimpleQueue()
        threading.Thread(target=self._serve, name="meeting", daemon=True).start()

    def ask(self, call: Callable, *args) -> Future:
        """What `call` returns or raises, once those before it have."""
        answer: Future = Future()
        self._asked.put((answer, call, args))
        return answer

    def _serve(self) -> None:
        while True:
            answer, call, args = self._asked.get()
            try:
                answer.set_result(call(*args))
            except Exception as error:  # noqa: BLE001  it is raised where it was asked
                answer.set_exception(error)


class Meeting:
    """Where the agents of one group meet, each of which runs the workers of one node.

    Every incarnation of the workers is a round, with a fresh store of the workers' own that node 0 starts. The agents
    of a group on several nodes share the run directory: node 0 serves a store for as long as its agent lives and
    publishes its address there, under the group's claim, so that agents of an earlier start do not meet those of a
    later one. A node whose workers died joins the next round; the others see that it waits and follow. Each agent
    counts up a beat in the store, and reads the others': whoever is alone, or comes into a meeting that lacks somebody
    for ARRIVAL_S, ends with NodeLost instead of waiting for ever. All stay until the workers of all have finished, node
    0 the longest.

    Args:
        file: one per group.
        claim: of this start of the group.
        nodes, node_rank: of the group.
        ranks: of this node.
        host: address that node 0 serves on.
        stopping: whether to give up waiting.
    """

    def __init__(
        self, file: Path, claim: str, nodes: int, node_rank: int, ranks: int, host: str, stopping: Callable[[], bool]
    ) -> None:
        self._file, self._claim, self._host = file, claim, host
        self._nodes, self._node_rank, self._ranks, self._stopping = nodes, node_rank, ranks, stopping
        self._store: TCPStore | None = None
        self._calls: _Calls | None = None
        self._round = 0
        self._next_beat = 0.0
        self._awake = Awake()
        self._heard: dict[int, tuple[int, float]] = {}  # of the other nodes: beats so far, and when that was new

    def next_round(self) -> Round:
        """Join the next round, and wait for the other nodes. Raises NodeLost and AskedToStop, and RuntimeError for the
        second agent of a node."""
        if self._store is None:
            self._calls = _Calls()
            self._store = self._meet()
        return self._join(self._store)

    def _join(self, store: TCPStore) -> Round:
        self._round += 1
        name = f"round-{self._round}"
        self._ask(store.delete_key, f"ended/{self._node_rank}")
        self._ask(store.set, f"{name}/ranks/{self._node_rank}", str(self._ranks))
        self._ask(store.add, f"{name}/joined", 1)
        while self._ask(store.add, f"{name}/joined", 0) < self._nodes:
            self._pause(store)
        listener = None
        if self._node_rank == 0:
            listener = listen(self._host)
            self._ask(store.set, f"{name}/workers", f"{self._host} {listener.getsockname()[1]}")
        while not self._ask(store.check, [f"{name}/workers"]):
            self._pause(store)
        host, port = self._ask(store.get, f"{name}/workers").decode().split()
        sizes = [int(self._ask(store.get, f"{name}/ranks/{node}")) for node in range(self._nodes)]
        return Round(self._claim, host, int(port), self._node_rank, sizes, listener)

    def _meet(self) -> TCPStore:
        """The store that all agents of this start of the group share."""
        if self._node_rank == 0:
            listener = listen(self._host)
            port = listener.getsockname()[1]
            store = group_store.serve(listener.detach(), self._host, port)
            write_json(self._file, {"claim": self._claim, "host": self._host, "port": store.port})
            return store
        came = time.monotonic()
        while (found := read_json(self._file)).get("claim") != self._claim:
            self._look_for(0, came)
            self._pause()
        place = found["host"], found["port"]
        options = {"is_master": False, "timeout": group_store.TIMEOUT, "wait_for_workers": False}
        store = self._ask(lambda: TCPStore(*place, **options))
        if self._ask(store.add, f"came/{self._node_rank}", 1) > 1:
            raise RuntimeError(
                f"an agent of node {self._node_rank} has been in this start of the group already: start the agents of "
                "all its nodes again, with a higher --restart"
            )
        return store

    def _ask(self, call: Callable, *args) -> Any:
        """What `call` returns. Raises NodeLost when node 0 does not answer, and AskedToStop when it has not yet."""
        assert self._calls is not None
        answer = self._calls.ask(call, *args)
        for _ in range(round(PEER_SILENCE_S / POLL_S)):  # no clock: all may have been stopped meanwhile
            try:
                return answer.result(POLL_S)
            except DistNetworkError as error:
                raise NodeLost(FIRST_NODE_GONE) from error
            except TimeoutError:
                if self._stopping():
                    raise AskedToStop from None
        raise NodeLost(SILENT.format(node=0))

    def beat(self) -> None:
        """While asked to stop: others may hear of it later, and must not miss this one before."""
        if self._store is not None:
            with contextlib.suppress(AskedToStop, NodeLost):
                self._keep_in_touch(self._store)

    def _keep_in_touch(self, store: TCPStore) -> None:
        """Beat, and listen unless asked to stop. Raises NodeLost."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        awake_mono = self._awake.since()
        self._next_beat = now + PEER_BEAT_S
        self._ask(store.add, f"beats/{self._node_rank}", 1)
        if self._stopping():
            return
        for node in range(self._nodes):
            if node == self._node_rank or self._ask(store.check, [f"left/{node}"]):
                continue
            count = self._ask(store.add, f"beats/{node}", 0)
            known, since = self._heard.setdefault(node, (0, now))
            if count != known:
                self._heard[node] = (count, now)
            elif not known:
                self._look_for(node, since)
            elif now - max(since, awake_mono) > PEER_SILENCE_S:
                raise NodeLost(SILENT.format(node=node))

    def _look_for(self, node: int, since: float) -> None:
        """Raises NodeLost when `node` has not come within ARRIVAL_S."""
        if time.monotonic() - since > ARRIVAL_S:
            raise NodeLost(f"the agent on node {node} of this group has not come within {ARRIVAL_S:g} s")

    def _pause(self, store: TCPStore | None = None) -> None:
        if self._stopping():
            raise AskedToStop
        if store is not None:
            self._keep_in_touch(store)
        time.sleep(POLL_S)

    def is_awaited(self) -> bool:
        """Whether another node has gone on to the next round and waits there for this one. Raises NodeLost."""
        if self._store is None:
            return False
        try:
            self._keep_in_touch(self._store)
            return self._ask(self._store.add, f"round-{self._round + 1}/joined", 0) > 0
        except AskedToStop:
            return False

    def tell_killed(self) -> None:
        """A signal ended a worker of this node: what fails on the others now, fails for want of it. Raises NodeLost."""
        if self._store is not None:
            with contextlib.suppress(AskedToStop):
                self._ask(self._store.add, f"round-{self._round}/killed", 1)

    def others_were_killed(self, within_s: float) -> bool:
        """Whether another node has told, or tells within that time, that a worker of this round was killed. Raises
        NodeLost."""
        deadline = time.monotonic() + within_s
        try:
            while self._store is not None:
                if self._ask(self._store.add, f"round-{self._round}/killed", 0) > 0:
                    return True
                if time.monotonic() > deadline:
                    break
                self._pause(self._store)
        except AskedToStop:
            pass
        return False

    def all_ended(self) -> bool:
        """The workers of this node have finished: whether those of the others have as well. Raises NodeLost."""
        if self._store is None:
            return True
        try:
            self._ask(self._store.set, f"ended/{self._node_rank}", "1")
            if not self._ask(self._store.check, [f"ended/{node}" for node in range(self._nodes)]):
                return False
            self._ask(self._store.set, f"left/{self._node_rank}", "1")
            # Node 0 takes the store with it.
            left = [f"left/{node}" for node in range(self._nodes)]
            return self._node_rank != 0 or self._ask(self._store.check, left)
        except AskedToStop:
            return False
