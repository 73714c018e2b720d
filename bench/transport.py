"""Measure how fast a rank column connects over Gloo, and how fast the other members get free when one is lost.

    python bench/transport.py [--rebuilds 200] [--kills 200] [--json RESULT.json]

Uses real processes and the plugin's own `RankColumn`, with its watch, on this machine's loopback. Prints three parts.
`rebuilds`: the time to connect three members, and file descriptors and threads before and after all rebuilds.
`give_ups`: one member breaks the column while the two others have three sums under way. How long until these sums have
ended, so that their memory and threads are free, and how long the first sum of the next column takes.
`kills`: a member kills itself at a random moment while the three connect. How long until the two others are connected
again, and until all three are with a new member. `early` are members that died before they had published their
address, which the others cannot notice before the connect timeout of 1 s.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The fork server finds the module that it preloads only this way.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])

import psutil
import torch
import torch.distributed as dist

from everstep.quorum.errors import SumsBroken
from everstep.quorum.process_group import Place, RankColumn, connect_store

TIMEOUT, CONNECT = timedelta(seconds=5), timedelta(seconds=1)
TOKEN = bytes(range(32))
SPREAD_S = 0.03
"""A kill comes at most this many seconds after connecting began."""


def member(store: str, pipe: Connection) -> None:
    """Run one member in this process: do what it is told, and answer how long that took."""
    torch.set_num_threads(1)
    column = RankColumn("gloo", column=0, host="127.0.0.1", connect_timeout=CONNECT, token=TOKEN)
    # Done here, outside the measured time, because it looks up an address's name at the name server.
    column._stores[store] = connect_store(store, CONNECT)
    board = connect_store(store, CONNECT)
    me, under_way = psutil.Process(), []
    while True:
        try:
            what, *given = pipe.recv()
        except EOFError:
            return
        begin, answer = time.monotonic(), None
        try:
            if what == "connect":
                key, rank, size, dies_after_s = given
                if dies_after_s is not None:
                    threading.Timer(dies_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
                board.set(f"{key}/{rank}", column.address)
                peers = tuple(board.get(f"{key}/{peer}").decode() for peer in range(size))
                column.connect(Place(key, store, 0, rank, peers))
            elif what == "sum":
                answer = float(column.total(torch.full((1 << 18,), float(given[0])), TIMEOUT)[0])
            elif what == "begin":
                under_way = [column.start(torch.ones(1 << 20), TIMEOUT) for _ in range(3)]
            elif what == "end":
                while not all(one.ended for one in under_way):
                    time.sleep(0.001)
            elif what == "abort":
                column.abort()
            elif what == "count":
                answer = me.num_fds(), me.num_threads()
        except SumsBroken as error:
            answer = str(error)
        pipe.send((time.monotonic() - begin, answer))


class Members:
    """Three processes and the store between them."""

    def __init__(self, context: Any) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context, self._keys = context, 0
        self.pipes: list[Connection] = [None, None, None]  # pyrefly: ignore[bad-assignment] filled below
        self.processes: list[Any] = [None, None, None]
        for rank in range(3):
            self.begin(rank)

    def begin(self, rank: int) -> None:
        self.pipes[rank], theirs = self._context.Pipe()
        self.processes[rank] = self._context.Process(
            target=member, args=(f"127.0.0.1:{self._store.port}", theirs), daemon=True
        )
        self.processes[rank].start()
        theirs.close()
        self.do([rank], "count")

    def do(self, ranks: list[int], what: str, *given: Any) -> list[tuple[float, Any]]:
        for rank in ranks:
            self.pipes[rank].send((what, *given))
        return [self.pipes[rank].recv() for rank in ranks]

    def connect(self, ranks: list[int], dies: int = -1, after_s: float = 0.0) -> list[tuple[float, Any]]:
        self._keys += 1
        key = f"quorum-{self._keys}"
        for place, rank in enumerate(ranks):
            self.pipes[rank].send(("connect", key, place, len(ranks), after_s if rank == dies else None))
        return [self.pipes[rank].recv() for rank in ranks if rank != dies]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def rebuilds(members: Members, times: int) -> dict[str, Any]:
    took, before, failed = [], (0, 0), 0
    for number in range(times + 5):
        if number == 5:
            before = members.do([0], "count")[0][1]
        answers = members.connect([0, 1, 2])
        if any(error for _, error in answers):
            failed += 1
            continue
        took.append(max(seconds for seconds, _ in answers))
        assert all(total == 3.0 for _, total in members.do([0, 1, 2], "sum", 1.0))
    after = members.do([0], "count")[0][1]
    return {
        "rebuild_ms": spread(took),
        "failed": failed,
        "fds": [before[0], after[0]],
        "threads": [before[1], after[1]],
    }


def connected(members: Members) -> None:
    while any(error for _, error in members.connect([0, 1, 2])):
        pass


def give_ups(members: Members, times: int) -> dict[str, Any]:
    ended, first = [], []
    for _ in range(times):
        connected(members)
        members.do([0, 1], "begin")
        for rank in (0, 1):
            members.pipes[rank].send(("end",))
        members.do([2], "abort")
        ended.append(max(members.pipes[rank].recv()[0] for rank in (0, 1)))
        members.do([0, 1], "abort")
    for _ in range(times):
        connected(members)
        members.do([0, 1], "begin")
        members.do([2, 0, 1], "abort")
        connected(members)
        answers = members.do([0, 1, 2], "sum", 1.0)
        first.append(max(seconds for seconds, _ in answers))
        members.do([0, 1], "end")
    return {"sums_ended_ms": spread(ended), "first_sum_ms": spread(first)}


def kills(members: Members, times: int) -> dict[str, Any]:
    chance, again, early, grown, held, both = random.Random(7), [], [], [], 0, [0, 1]
    before = members.do([0], "count")[0][1]
    for _ in range(times):
        begin = time.monotonic()
        first = members.connect([0, 1, 2], dies=2, after_s=chance.uniform(0, SPREAD_S))
        while True:
            answers = members.connect(both)
            if not any(error for _, error in answers):
                break
            held += 1
        assert all(total == 2.0 for _, total in members.do(both, "sum", 1.0))
        unseen = any(error and "/watch/2" in error for _, error in first)
        (early if unseen else again).append(time.monotonic() - begin)
        members.processes[2].join()
        members.begin(2)
        answers = members.connect([0, 1, 2])
        if any(error for _, error in answers):
            held += 1
        else:
            grown.append(max(seconds for seconds, _ in answers))
    time.sleep(1)
    after = members.do([0], "count")[0][1]
    return {
        "again_ms": spread(again),
        "early": len(early),
        "early_ms": spread(early),
        "grown_ms": spread(grown),
        "failed_again": held,
        "fds": [before[0], after[0]],
        "threads": [before[1], after[1]],
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest value in milliseconds."""
    ordered = sorted(1000 * value for value in seconds) or [0.0]
    return {
        "median": round(statistics.median(ordered), 1),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
        "largest": round(ordered[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rebuilds", type=int, default=200)
    parser.add_argument("--give-ups", type=int, default=10)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    asked = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transport"])
    found: dict[str, Any] = {}
    for part, times in ((rebuilds, asked.rebuilds), (give_ups, asked.give_ups), (kills, asked.kills)):
        members = Members(context)
        found[part.__name__] = part(members, times)
        members.close()
        print(part.__name__, times, json.dumps(found[part.__name__]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
