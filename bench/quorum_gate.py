"""What the gate in front of torchft's lighthouse adds to a quorum: the same groups with it and without it.

    python bench/quorum_gate.py [--groups 64] [--pairs 12] [--quorums 20]

Both lighthouses run all the time, and get all the groups' heartbeats. Blocks of quorums take turns (direct, gated,
gated, direct, …); in a block all groups ask at once, and again when all have been answered. The groups are as light as
they can be, as all of it shares this machine's cores and groups of a real run have their own: a thread of one process
for each with torchft's client, one loop over all connections at the gate, what they are told is not read, and directly
nothing is told of them but their ids, as torchft's client makes objects of the rest. Prints p50 and p99 of what a group
waits, medians of the blocks, and quartiles of the ratios of neighbouring blocks.
"""

import argparse
import json
import multiprocessing
import os
import queue
import selectors
import statistics
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from statistics import quantiles

from everstep import wire
from everstep.quorum.gate import PURPOSE, Asked
from everstep.quorum.identity import replica_id, saying_code
from everstep.quorum.membership import CODE, DATA, HEARTBEAT_S
from everstep.step.quorum import encode
from everstep.wire.channel import _HEAD
from quorum_scale import TOKEN, request_of, start_direct, start_lighthouse

TIMEOUT = timedelta(seconds=30)


def asked_by(group: int, number: int) -> Asked:
    """What a group of a real run asks for its `number`th quorum."""
    request, replica = request_of(group, "bench", number, number), replica_id(TOKEN, group, "bench")
    saying = encode(request)
    data = {DATA: saying, CODE: saying_code(TOKEN, replica, saying)}
    return Asked("quorum", replica, request.store, number, 0.95 * TIMEOUT.total_seconds(), data)


def take_unread(channel: wire.Channel) -> None:
    """Take a message in and check its code, and no more."""
    head = channel.receive(_HEAD.size)
    channel._receive_body(head, [memoryview(bytearray(_HEAD.unpack(head)[2]))])


class Gated:
    """All groups at a gated lighthouse: one loop over their connections."""

    def __init__(self, address: str, groups: int) -> None:
        at = address.removeprefix("http://")
        self._channels = [wire.connect(at, TOKEN, TIMEOUT, purpose=PURPOSE) for _ in range(groups)]
        self._selector = selectors.DefaultSelector()
        for group, channel in enumerate(self._channels):
            self._selector.register(channel.detach(), selectors.EVENT_READ, group)

    def quorum(self, requests: list[Asked]) -> list[float]:
        """What each group waits, in seconds."""
        messages = [wire.encoded(asdict(request)) for request in requests]
        asked, waits = [], [0.0] * len(messages)
        for channel, message in zip(self._channels, messages, strict=True):
            asked.append(time.perf_counter())
            channel.send_frame(message)
        left = len(messages)
        while left:
            for key, _ in self._selector.select():
                take_unread(self._channels[key.data])
                waits[key.data] = time.perf_counter() - asked[key.data]
                left -= 1
        return waits


class Direct:
    """All groups at torchft's lighthouse: a thread with a client for each."""

    def __init__(self, address: str, groups: int) -> None:
        from torchft.coordination import LighthouseClient

        self._answers: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._orders: list[queue.SimpleQueue[Asked]] = [queue.SimpleQueue() for _ in range(groups)]
        for group in range(groups):
            client = LighthouseClient(address, TIMEOUT)
            threading.Thread(target=self._ask, args=(group, client), daemon=True).start()

    def _ask(self, group: int, client) -> None:
        while True:
            request = self._orders[group].get()
            asked = time.perf_counter()
            client.quorum(
                replica_id=request.replica,
                timeout=TIMEOUT,
                store_address=request.store,
                step=request.step,
                world_size=1,
            )
            self._answers.put((group, time.perf_counter() - asked))

    def quorum(self, requests: list[Asked]) -> list[float]:
        """What each group waits, in seconds."""
        for orders, request in zip(self._orders, requests, strict=True):
            orders.put(request)
        return [wait for _, wait in (self._answers.get() for _ in requests)]


def keep_beating(direct: str, gated: str, groups: int) -> None:
    """Heartbeats of all groups at both."""
    from torchft.coordination import LighthouseClient

    client, at = LighthouseClient(direct, TIMEOUT), gated.removeprefix("http://")
    channels = [wire.connect(at, TOKEN, TIMEOUT, purpose=PURPOSE) for _ in range(groups)]
    replicas = [replica_id(TOKEN, group, "bench") for group in range(groups)]
    while True:
        began = time.monotonic()
        for channel, replica in zip(channels, replicas, strict=True):
            client.heartbeat(replica, timeout=TIMEOUT)
            channel.ask({"op": "beat", "replica": replica})
        time.sleep(max(0.0, HEARTBEAT_S - (time.monotonic() - began)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--quorums", type=int, default=20, help="of a block")
    args = parser.parse_args()
    os.environ["RUST_LOG"] = "error"
    os.environ["TOKIO_WORKER_THREADS"] = "1"  # each client has a runtime of its own
    started = {"direct": start_direct(args.groups), "gated": start_lighthouse(args.groups)}
    addresses = {kind: address for kind, (_, address) in started.items()}
    context = multiprocessing.get_context("spawn")
    beating = context.Process(target=keep_beating, args=(*addresses.values(), args.groups), daemon=True)
    beating.start()
    try:
        crowds = {"direct": Direct(addresses["direct"], args.groups), "gated": Gated(addresses["gated"], args.groups)}
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in crowds}
        numbers = dict.fromkeys(crowds, 0)
        for block in range(-1, args.pairs):  # the first is not counted
            for kind in list(crowds)[:: 1 if block % 2 == 0 else -1]:
                waits = []
                for _ in range(args.quorums):
                    numbers[kind] += 1
                    waits += crowds[kind].quorum([asked_by(group, numbers[kind]) for group in range(args.groups)])
                cuts = quantiles(waits, n=100, method="inclusive")
                if block >= 0:
                    found[kind].append((cuts[49], cuts[98]))
        report = {
            "groups": args.groups,
            "quorums": args.pairs * args.quorums,
            "seconds": {
                kind: dict(zip(("p50", "p99"), map(statistics.median, zip(*blocks, strict=True)), strict=True))
                for kind, blocks in found.items()
            },
        }
        for number, name in enumerate(("p50", "p99")):
            ratios = [gated[number] / direct[number] for direct, gated in zip(*found.values(), strict=True)]
            report[f"{name}, gated/direct"] = statistics.quantiles(ratios, n=4, method="inclusive")
        print(json.dumps(report), flush=True)
    finally:
        beating.kill()
        for process, _ in started.values():
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
    os._exit(0)  # Python aborts a process that ends while one of its threads is in torchft's client
