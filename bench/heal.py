"""Measure how fast a joiner gets a state from one source and from several, and how much processor time that takes.

    python bench/heal.py [--gb 1] [--sources 1 2 8] [--mbyte 100] [--rounds 3] [--unsealed] [--json]

Each source is a separate process on this machine. Its connections are limited to a rate, as if it had a separate link
(SO_MAX_PACING_RATE; `--mbyte 0`: as fast as loopback copies memory). Each round measures all numbers of sources, in
reverse order in every second round. The received state is compared bit by bit.

Prints medians of the rounds: MB/s (10^6 bytes), and the ratio to the first number of sources; processor seconds per GB
of the joiner, and of all sources together; and processor seconds per GB that each source needs first, for its copy of
the state. `--unsealed`: also measures records that are not encrypted.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import struct
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.multiprocessing  # noqa: F401 -- shares tensors with other processes instead of copying them

from everstep.quorum.heal import Fetch, HealState, StateServer, Wanted, _Copy
from everstep.quorum.streams import Streams
from everstep.wire import door, sealing

TOKEN = bytes(range(32))
TIMEOUT = timedelta(seconds=60)
TENSORS = 64
SO_MAX_PACING_RATE = 47
SEALER = door.Sealer


class Unsealed:
    """A `Sealer` that does not encrypt records; their tags are zeros."""

    def seal(self, head, views):
        return b"".join([head, *views, bytes(sealing.TAG_BYTES)])

    def open(self, head, sealed, into):
        for view in into:
            view[:], sealed = sealed[: view.nbytes], sealed[view.nbytes :]


def seal(sealed: bool) -> None:
    """Encrypt this process's new connections from now on, or do not."""
    door.Sealer = SEALER if sealed else (lambda key: Unsealed())  # pyrefly: ignore[bad-assignment]


def source(pipe, tensors: dict[str, torch.Tensor], bytes_per_s: float) -> None:
    """Serve a state in this process. Sends its address and the processor seconds of a copy, then seals as told."""
    torch.set_num_threads(1)
    state = HealState(tensors=tensors)
    began, copy = time.process_time(), _Copy(state, Streams(), TIMEOUT.total_seconds())
    copy.begin()
    copy.join()
    copied_s = time.process_time() - began
    del copy
    server = StateServer("127.0.0.1", TOKEN, TIMEOUT)
    server.serve(1, 0, state)
    rate = int(bytes_per_s) if bytes_per_s else 2**64 - 1
    server._server._listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", rate))
    pipe.send((server.address, copied_s))
    while True:
        seal(pipe.recv())
        pipe.send(True)


class Sources:
    """`count` processes that each serve the same state."""

    def __init__(self, count: int, tensors: dict[str, torch.Tensor], bytes_per_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes, self.addresses, self.copied_s = [], [], [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=source, args=(theirs, tensors, bytes_per_s), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            address, copied_s = pipe.recv()
            self.addresses.append(address)
            self.copied_s.append(copied_s)
        self._used = [psutil.Process(process.pid) for process in self._processes]

    def seal(self, sealed: bool) -> None:
        for pipe in self._pipes:
            pipe.send(sealed)
            pipe.recv()

    def used_s(self) -> float:
        """Return the processor seconds that all sources together have used so far."""
        return sum(sum(each.cpu_times()[:2]) for each in self._used)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def take(sources: Sources, count: int, tensors: dict[str, torch.Tensor], sealed: bool) -> tuple[float, float, float]:
    """Fetch a state from `count` sources. Returns bytes per second, and processor seconds of joiner and sources."""
    sources.seal(sealed)
    seal(sealed)
    used, given = time.process_time(), sources.used_s()
    fetch = Fetch(sources.addresses[:count], Wanted(1, 0, ""), tensors, TOKEN, TIMEOUT)
    while fetch.state is None and not fetch.error:
        time.sleep(0.01)
    used, given = time.process_time() - used, sources.used_s() - given
    got = fetch.state
    assert got is not None, fetch.error
    assert all(torch.equal(got.tensors[name], tensor) for name, tensor in tensors.items())
    return fetch.nbytes / fetch.took_s, used, given


def measure(gb: float, mbyte: float, counts: list[int], rounds: int, kinds: list[bool]) -> list[dict[str, Any]]:
    """Return a row of results for each number of sources and each kind of connection, for a state of `gb` GB."""
    words = int(gb * 1e9) // (TENSORS * 8)
    tensors = {f"layer.{i}": torch.randint(1 << 62, (words,)).share_memory_() for i in range(TENSORS)}
    nbytes = words * 8 * TENSORS
    sources = Sources(max(counts), tensors, mbyte * 1e6)
    found: dict[tuple[int, bool], list[tuple[float, float, float]]] = {(n, k): [] for n in counts for k in kinds}
    take(sources, max(counts), tensors, True)  # now each source has copied the state
    for number in range(rounds):
        for count, sealed in list(found)[:: -1 if number % 2 else 1]:
            found[count, sealed].append(take(sources, count, tensors, sealed))
    sources.close()
    rows = []
    for (count, sealed), each in found.items():
        rate, used, given = (statistics.median(values) for values in zip(*each, strict=True))
        row = {"gb": nbytes / 1e9, "mbyte": mbyte, "sources": count, "sealed": sealed, "mb_per_s": rate / 1e6}
        row |= {"joiner_s_per_gb": used / nbytes * 1e9, "sources_s_per_gb": given / nbytes * 1e9}
        rows.append(row | {"copy_s_per_gb": statistics.median(sources.copied_s) / nbytes * 1e9})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state")
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 2, 8], help="numbers of sources to measure")
    parser.add_argument("--mbyte", type=float, nargs="+", default=[100.0], help="MB/s of each source; 0: no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unsealed", action="store_true", help="also measure records that are not encrypted")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("    GB  MB/s a source  sources          MB/s  of one  processor s/GB: joiner  sources  each one's copy")
    for mbyte in args.mbyte:
        some = measure(args.gb, mbyte, args.sources, args.rounds, [True, False][: 1 + args.unsealed])
        for row in some:
            of_one = row["mb_per_s"] / some[0]["mb_per_s"]
            kind = "" if row["sealed"] else "unsealed"
            print(
                f"{row['gb']:6.2f}  {mbyte:13g}  {row['sources']:7}  {kind:8}{row['mb_per_s']:6.0f}  {of_one:6.2f}"
                f"  {row['joiner_s_per_gb']:22.2f}  {row['sources_s_per_gb']:7.2f}  {row['copy_s_per_gb']:15.2f}",
                flush=True,
            )
        rows += some
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
