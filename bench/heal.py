"""Heal transport against raw loopback sockets: same bytes, same number of connections, two processes.

    python bench/heal.py [--gb 1.0] [--connections 1 2 4] [--rounds 3] [--json]

Raw: the source calls `sendall` on the tensors' memory, the joiner `recv_into` into its buffers; nothing is
checked. Both sides use memory that has been touched before. Prints GB/s (10^9 bytes) as median over rounds,
alternating.
"""

import argparse
import json
import multiprocessing
import signal
import socket
import statistics
import threading
import time
from datetime import timedelta

import torch

from everstep.quorum.heal import HealServer, HealState, fetch

TOKEN = bytes(range(32))
TIMEOUT = timedelta(seconds=60)
TENSORS = 64


def make_state(nbytes: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((nbytes // TENSORS // 4,), float(i)) for i in range(TENSORS)}


def source(pipe, nbytes: int) -> None:
    tensors = make_state(nbytes)
    views = [t.view(torch.uint8).numpy().data for t in tensors.values()]
    server = HealServer("127.0.0.1", TOKEN, TIMEOUT)
    server.serve(1, HealState(tensors=tensors))
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.address, listener.getsockname()[1]))

    def raw(connection: socket.socket) -> None:
        part, parts = connection.recv(2)
        for view in views[part::parts]:
            connection.sendall(view)
        connection.close()

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=raw, args=(connection,), daemon=True).start()


def raw_fetch(port: int, into: dict[str, torch.Tensor], connections: int) -> None:
    views = [t.view(torch.uint8).numpy().data for t in into.values()]

    def receive(part: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as s:
            s.send(bytes([part, connections]))
            for view in views[part::connections]:
                got = 0
                while got < len(view):
                    got += s.recv_into(view[got:], 0, socket.MSG_WAITALL)

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(connections)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    nbytes = int(args.gb * 1e9) // (TENSORS * 4) * TENSORS * 4

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=source, args=(theirs, nbytes), daemon=True)
    process.start()
    address, port = ours.recv()
    into = make_state(nbytes)
    rows = []
    for connections in args.connections:
        rates: dict[str, list[float]] = {"raw": [], "heal": []}
        for _ in range(args.rounds):
            for name in rates:
                began = time.perf_counter()
                if name == "raw":
                    raw_fetch(port, into, connections)
                else:
                    fetch(address, TOKEN, 1, into, TIMEOUT, connections)
                rates[name].append(nbytes / 1e9 / (time.perf_counter() - began))
        raw, heal = (statistics.median(rates[n]) for n in ("raw", "heal"))
        rows.append({"gb": nbytes / 1e9, "connections": connections, "raw": raw, "heal": heal, "ratio": heal / raw})
        if not args.json:
            print(f"{connections} connections: raw {raw:.2f} GB/s, heal {heal:.2f} GB/s, ratio {heal / raw:.2f}")
    if args.json:
        print(json.dumps(rows))
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM


if __name__ == "__main__":
    main()
