"""Measure how fast snapshots are coded: GB (10^9 bytes) of source per second on one thread, best of 5 runs.

python bench/snapshot.py [--mb 32] [--shards 4]
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from everstep.snapshot import parity
from everstep.snapshot.buffer import chunk_digests

RUNS = 5


def best_s(action: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=32, help="MiB of each source")
    parser.add_argument("--shards", type=int, default=4, help="number of sources that are combined")
    args = parser.parse_args()
    data, out = ([parity.aligned_bytes(args.mb << 20) for _ in range(count)] for count in (args.shards, 2))
    for seed, array in enumerate((*data, *out)):  # touch all memory before it is timed
        array[:] = np.random.default_rng(seed).integers(0, 256, len(array), dtype=np.uint8)

    def combine(count: int) -> None:
        parity.combine(parity.encoding_rows(len(data), count), data, out[:count])

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: [np.copyto(out[0], shard) for shard in data],
        "xxh3": lambda: [chunk_digests(shard.data) for shard in data],
        "XOR": lambda: combine(1),
        "P + Q": lambda: combine(2),
    }
    for name, way in ways.items():
        print(f"{name:8} {sum(map(len, data)) / 1e9 / best_s(way):6.2f} GB/s")


if __name__ == "__main__":
    main()
