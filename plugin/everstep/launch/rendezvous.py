"""How the agents of one group meet, on one node or on several."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from everstep.launch.address import read_json, write_json

POLL_S = 0.1
STORE_TIMEOUT = timedelta(seconds=60)


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
    the next round; the others see that somebody waits (TorchElastic's own way) and follow.

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

    def get_backend(self) -> str:
        return "run-dir"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = self._meet()
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

    def _pause(self) -> None:
        if self._stopping():
            raise RendezvousClosedError("asked to stop while the other nodes of the group were awaited")
        time.sleep(POLL_S)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        """Nodes that have gone on to the next round and wait there for this one."""
        return 0 if self._store is None else self._store.add(f"round-{self._round + 1}/joined", 0)

    def get_run_id(self) -> str:
        return self._claim

    def shutdown(self) -> bool:
        return True
