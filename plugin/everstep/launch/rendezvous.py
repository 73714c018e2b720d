"""How the agents of one group meet, on one node or on several."""

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from everstep.run.files import read_json, write_json

POLL_S = 0.1
STORE_TIMEOUT = timedelta(seconds=60)
PEER_BEAT_S = 0.5
PEER_SILENCE_S = 30.0
"""An agent of the group that was there and has said nothing for this long is gone, its node with it perhaps."""

FIRST_NODE_GONE = "the agent on node 0 of this group is gone"


class NodeLost(RuntimeError):
    """The agent on another node of this group is gone: a batch system has to start the group again."""


def _serve_store(host: str) -> TCPStore:
    """A fresh store on a free port of `host` only."""
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class OneNodeRendezvous(RendezvousHandler):
    """Rendezvous of a group that lives on one node: a fresh store for each incarnation, on `host` only.

    TorchElastic's own stores listen on every interface; this one is handed a socket that does not. The
    workers use the same store for `init_process_group`.
    """

    def __init__(self, run_id: str, host: str):
        self._run_id = run_id
        self._host = host

    def get_backend(self) -> str:
        return "one-node"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = _serve_store(self._host)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._host, store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class RunDirRendezvous(RendezvousHandler):
    """Rendezvous of a group on several nodes, which share the run directory.

    Node 0 serves a store for as long as its agent lives and publishes its address in the run directory, under the
    group's claim, so that agents of an earlier start do not meet those of a later one. Every incarnation of the
    workers is a round: all nodes join it, then node 0 serves the workers' own store. A node whose workers died joins
    the next round; the others see that somebody waits (TorchElastic's own way) and follow. Each agent counts up a beat
    in the store, and reads the others': whoever is alone ends with NodeLost instead of waiting for ever.

    Args:
        meeting: the file, one per group.
        claim: of this start of the group.
        nodes, node_rank: of the group.
        host: address that node 0 serves on.
        stopping: whether to give up waiting.
    """

    def __init__(
        self, meeting: Path, claim: str, nodes: int, node_rank: int, host: str, stopping: Callable[[], bool]
    ) -> None:
        self._meeting, self._claim, self._host = meeting, claim, host
        self._nodes, self._node_rank, self._stopping = nodes, node_rank, stopping
        self._store: TCPStore | None = None
        self._round = 0
        self._next_beat = 0.0
        self._heard: dict[int, tuple[int, float]] = {}  # of the other nodes: beats so far, and when that was new

    def get_backend(self) -> str:
        return "run-dir"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            return self._next_round(self._meet())
        except DistNetworkError as error:
            raise NodeLost(FIRST_NODE_GONE) from error

    def _next_round(self, store: TCPStore) -> RendezvousInfo:
        self._round += 1
        name = f"round-{self._round}"
        store.add(f"{name}/joined", 1)
        while store.add(f"{name}/joined", 0) < self._nodes:
            self._pause()
        if self._node_rank == 0:
            own = _serve_store(self._host)
            store.set(f"{name}/workers", f"{self._host} {own.port}")
            return RendezvousInfo(own, 0, self._nodes, RendezvousStoreInfo(self._host, own.port))
        while not store.check([f"{name}/workers"]):
            self._pause()
        host, port = store.get(f"{name}/workers").decode().split()
        workers = TCPStore(host, int(port), is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)
        return RendezvousInfo(workers, self._node_rank, self._nodes, RendezvousStoreInfo(host, int(port)))

    def _meet(self) -> TCPStore:
        """The store that all agents of this start of the group share."""
        if self._store is not None:
            return self._store
        if self._node_rank == 0:
            self._store = _serve_store(self._host)
            write_json(self._meeting, {"claim": self._claim, "host": self._host, "port": self._store.port})
            return self._store
        while (found := read_json(self._meeting)).get("claim") != self._claim:
            self._pause()
        self._store = TCPStore(
            found["host"], found["port"], is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False
        )
        return self._store

    def _keep_in_touch(self, store: TCPStore) -> None:
        """Beat, and listen. Raises NodeLost."""
        now = time.monotonic()
        if now < self._next_beat or self._stopping():
            return
        self._next_beat = now + PEER_BEAT_S
        store.add(f"beats/{self._node_rank}", 1)
        beats = {
            node: store.add(f"beats/{node}", 0)
            for node in range(self._nodes)
            if node != self._node_rank and not store.check([f"ended/{node}"])
        }
        for node, count in beats.items():
            known, since = self._heard.get(node, (0, now))
            if count != known:
                self._heard[node] = (count, now)
            elif known and now - since > PEER_SILENCE_S:
                raise NodeLost(f"the agent on node {node} of this group has been silent for {PEER_SILENCE_S:g} s")

    def _pause(self) -> None:
        if self._stopping():
            raise RendezvousClosedError("asked to stop while the other nodes of the group were awaited")
        if self._store is not None:
            self._keep_in_touch(self._store)
        time.sleep(POLL_S)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        """Nodes that have gone on to the next round and wait there for this one. Raises NodeLost."""
        if self._store is None:
            return 0
        try:
            self._keep_in_touch(self._store)
            return self._store.add(f"round-{self._round + 1}/joined", 0)
        except DistNetworkError as error:
            raise NodeLost(FIRST_NODE_GONE) from error

    def get_run_id(self) -> str:
        return self._claim

    def shutdown(self) -> bool:
        """This node's part is done; the others need not miss it."""
        if self._store is not None and self._node_rank:
            with contextlib.suppress(RuntimeError):  # node 0 may have ended with its store
                self._store.set(f"ended/{self._node_rank}", "1")
        return True
