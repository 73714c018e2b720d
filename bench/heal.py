"""What authentication and encryption of states cost: heals with and without.

    python bench/heal.py [--gb 0.064 0.512 2] [--rounds 6] [--gbit 0 10 25] [--json]

Two processes on this machine, the same bytes, all kinds in turn in every round, and in
the reverse order in every other round:

    unsealed   the heal transport, with records that are not sealed: what it would be without encryption
    heal       the heal transport

`--gbit`: hold the connection to that rate, as a network would (SO_MAX_PACING_RATE); 0 for as fast as memory
is copied through loopback. Both sides use memory that has been touched before. Prints GB/s (10^9 bytes) and the
processor seconds that a GB takes on both sides together, which other work on the machine disturbs less: medians of the
rounds, and ratios that are medians of each round's ratio.
"""

import argparse
import json
import multiprocessing
import signal
import socket
import statistics
import struct
import time
from datetime import timedelta
from typing import Any

import psutil
import torch

from everstep.quorum.heal import Door, Fetch, HealState, Wanted
from everstep.wire import door, sealing

TOKEN = bytes(range(32))
TIMEOUT = timedelta(seconds=60)
TENSORS = 64
KINDS = ("unsealed", "heal")
SO_MAX_PACING_RATE = 47
SEALER = door.Sealer


class Unsealed:
    """A `Sealer` that leaves records as they are, with an empty code."""

    def seal(self, head, views):
        return b"".join([head, *views, bytes(sealing.TAG_BYTES)])

    def open(self, head, sealed, into):
        for view in into:
            view[:], sealed = sealed[: view.nbytes], sealed[view.nbytes :]


def seal_like(kind: str) -> None:
    """From now on this process's new connections seal as this kind does."""
    door.Sealer = (lambda key: Unsealed()) if kind == "unsealed" else SEALER  # pyrefly: ignore[bad-assignment]


def make_state(nbytes: int) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((nbytes // TENSORS // 4,), float(i)) for i in range(TENSORS)}


def pace(listener: socket.socket, bytes_per_s: float) -> None:
    """What it accepts from now on sends no faster."""
    rate = int(bytes_per_s) if bytes_per_s else 2**64 - 1
    listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", rate))


def source(pipe, nbytes: int) -> None:
    """Serves each kind when told, at the rate that it is told."""
    server = Door("127.0.0.1", TOKEN, TIMEOUT)
    server.serve(1, 0, HealState(tensors=make_state(nbytes)))
    pipe.send(server.address)
    while True:
        kind, bytes_per_s = pipe.recv()
        seal_like(kind)
        pace(server._server._listener, bytes_per_s)
        pipe.send(True)


def take(address: str, into: dict[str, torch.Tensor]) -> None:
    wanted = Wanted(1, 0, "")
    fetch = Fetch(address, wanted, TOKEN, TIMEOUT)
    fetch.join()
    assert not fetch.error, fetch.error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.0], help="Gbit/s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [row for gb in args.gb for row in measure(gb, args.gbit, args.rounds)]
    if args.json:
        print(json.dumps(rows))


def measure(gb: float, gbits: list[float], rounds: int) -> list[dict[str, Any]]:
    """All kinds with a state of so many GB; prints and returns a row for each rate."""
    nbytes = int(gb * 1e9) // (TENSORS * 4) * TENSORS * 4
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=source, args=(theirs, nbytes), daemon=True)
    process.start()
    address = ours.recv()
    into = make_state(nbytes)
    server = psutil.Process(process.pid)
    rows = []

    def used_s() -> float:
        """Processor seconds of both processes so far."""
        return time.process_time() + sum(server.cpu_times()[:2])

    for gbit in gbits:
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(-1, rounds):  # the first is not counted
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                ours.send((kind, gbit * 1e9 / 8))
                ours.recv()
                seal_like(kind)
                began, used = time.perf_counter(), used_s()
                take(address, into)
                rates[kind].append(nbytes / 1e9 / (time.perf_counter() - began))
                costs[kind].append((used_s() - used) / (nbytes / 1e9))
            if number < 0:
                rates, costs = ({kind: [] for kind in KINDS} for _ in range(2))
        found = {kind: statistics.median(rates[kind]) for kind in KINDS}
        cost = {kind: statistics.median(costs[kind]) for kind in KINDS}
        ratio = statistics.median(x / y for x, y in zip(rates["heal"], rates["unsealed"], strict=True))
        rows.append({"gb": nbytes / 1e9, "gbit": gbit, "gb_per_s": found, "cpu_s_per_gb": cost} | {"ratio": ratio})
        print(f"{nbytes / 1e9:g} GB, {f'{gbit:g} Gbit/s' if gbit else 'loopback'}:")
        for title, values in (("GB/s", found), ("processor s/GB", cost), ("ratio", {"heal/unsealed": ratio})):
            print(f"  {title}:", ", ".join(f"{kind} {value:.2f}" for kind, value in values.items()), flush=True)
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM
    return rows


if __name__ == "__main__":
    main()
