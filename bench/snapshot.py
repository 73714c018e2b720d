"""What snapshots cost: time the trainer is blocked, bandwidths, memory. Beside torch DCP's async_save, in one
run.

    python bench/snapshot.py [--gb 0.1 0.5] [--steps 5] [--step-s 1.0] [--groups 3] [--json]

Blocked: in every method the trainer computes for `--step-s` seconds (matrix products), then changes the state
in place as an optimizer would, at every step. Time is counted from the end of the change until the trainer
computes again, plus what it waits before the next change. Reported as the median over steps, the first left
out (allocation).

- everstep: `Copier`, the segment in tmpfs, one group's 1/groups part; and the whole state, of a group that is alone.
- dcp async: `torch.distributed.checkpoint.async_save` to tmpfs, the previous save awaited before the next
  begins; on CUDA also with its pinned-memory stager in a process of its own.

Bandwidths are GB (10^9) of source per second, one thread, best of several runs, on memory that has been
touched.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from everstep.snapshot import parity
from everstep.snapshot.agreement import Word
from everstep.snapshot.buffer import chunk_digests
from everstep.snapshot.copier import Copier
from everstep.snapshot.layout import State
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment

TENSORS = 200
RUNS = 5


def best_s(action: Callable[[], None]) -> float:
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def bandwidths(nbytes: int = 32 << 20, shards: int = 4) -> dict[str, float]:
    """Of memcpy, checksums and parity over `shards` sources of `nbytes` each."""
    data = [parity.aligned_bytes(nbytes) for _ in range(shards)]
    out = [parity.aligned_bytes(nbytes) for _ in range(2)]
    for seed, array in enumerate((*data, *out)):
        array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    total = nbytes * shards / 1e9

    def memcpy() -> None:
        for shard in data:
            np.copyto(out[0], shard)

    def checksum() -> None:
        for shard in data:
            chunk_digests(shard.data)

    return {
        "memcpy": total / best_s(memcpy),
        "xxh3": total / best_s(checksum),
        "P": total / best_s(lambda: parity.combine(parity.encoding_rows(len(data), 1), data, out[:1])),
        "P and Q": total / best_s(lambda: parity.combine(parity.encoding_rows(len(data), len(out)), data, out)),
    }


class Trainer:
    """A state, and a step that changes all of it: a fixed amount of work, which takes `step_s` when nothing else runs,
    so that what copying takes from it shows as a longer step."""

    def __init__(self, nbytes: int, step_s: float, device: torch.device) -> None:
        count = nbytes // TENSORS // 4
        self.tensors = {f"layer.{i}": torch.randn(count, device=device) for i in range(TENSORS)}
        self._matrix = torch.randn(512, 512, device=device)
        self._rounds = 20
        self.compute()
        each_s = best_s(self.compute) / self._rounds
        self._rounds = max(1, round(step_s / each_s))

    def compute(self) -> None:
        for _ in range(self._rounds):
            self._matrix = torch.tanh(self._matrix @ self._matrix)
            if self._matrix.is_cuda:
                torch.cuda.synchronize()

    def change(self) -> None:
        torch._foreach_mul_(list(self.tensors.values()), 1.0001)


def measure(trainer: Trainer, steps: int, begin: Callable[[int], None], before_change: Callable[[], None]) -> dict:
    blocked, took = [], []
    for step in range(1, steps + 2):
        start = time.perf_counter()
        trainer.compute()
        at = time.perf_counter()
        before_change()
        waited = time.perf_counter() - at
        trainer.change()
        at = time.perf_counter()
        begin(step)
        blocked.append(waited + time.perf_counter() - at)
        took.append(time.perf_counter() - start)
    before_change()
    return {"blocked_s": statistics.median(blocked[1:]), "step_s": statistics.median(took[1:])}


def with_everstep(trainer: Trainer, steps: int, home: Path, groups: int) -> dict:
    settings = Snapshot(enable=True, segment_dir=str(home), memory_reserve_gb=0.5, parity=0, interval=1)
    segment = Segment.of(settings, "0" * 16, 0)
    segment.create()
    events: list[dict] = []
    copier = Copier(segment, 0, 1, settings, lambda kind, step=None, **fields: events.append({"kind": kind, **fields}))

    def begin(step: int) -> None:
        words = dict.fromkeys(range(groups), Word(published=True, coded=True))  # as if keepers had done with the last
        copier.committed(step, 1, range(groups), words, lambda: State(trainer.tensors, {"step": step}))

    row = measure(trainer, steps, begin, copier.wait)
    row["memory_bytes"] = sum(path.stat().st_size for path in segment.files("data", 0))
    copier.close()
    segment.remove()
    taken = [event for event in events if event["kind"] == "snapshot"]
    assert len(taken) == steps + 1, events
    return {
        **row,
        "copied_bytes": taken[-1]["bytes"],
        "copy_s": statistics.median(e["copy_s"] for e in taken[1:]),
    }


def with_dcp(trainer: Trainer, steps: int, home: Path, pinned: bool) -> dict:
    saving: Any = None
    stager = dcp.staging.DefaultStager() if pinned else None

    def wait() -> None:
        if saving is not None:
            (getattr(saving, "staging_completion", None) or saving).result()

    def begin(_: int) -> None:
        nonlocal saving
        if saving is not None:
            getattr(saving, "upload_completion", saving).result()
        folder = str(home / "dcp")  # one is enough: at 4 GB a second would not fit beside the rest
        if pinned:
            kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
            saving = dcp.async_save(
                dict(trainer.tensors), checkpoint_id=folder, async_checkpointer_type=kind, async_stager=stager
            )
        else:
            saving = dcp.async_save(dict(trainer.tensors), checkpoint_id=folder)

    # The plain async_save has staged when it returns; only the next save has to wait for it.
    row = measure(trainer, steps, begin, wait if pinned else lambda: None)
    if saving is not None:
        getattr(saving, "upload_completion", saving).result()
    if stager is not None:
        stager.close()
    shutil.rmtree(home / "dcp")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 0.5])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    home = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir="/dev/shm"))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    record: dict = {
        "device": str(device),
        "torch": torch.__version__,
        "bandwidth_gb_s": bandwidths(),
        "blocked": [],
    }
    try:
        for gb in args.gb:
            trainer = Trainer(int(gb * 1e9), args.step_s, device)
            methods: dict[str, Callable[[], dict]] = {
                "none": lambda trainer=trainer: measure(trainer, args.steps, lambda _: None, lambda: None),
                f"everstep 1/{args.groups}": lambda trainer=trainer: with_everstep(
                    trainer, args.steps, home, args.groups
                ),
                "everstep full": lambda trainer=trainer: with_everstep(trainer, args.steps, home, 1),
                "dcp async": lambda trainer=trainer: with_dcp(trainer, args.steps, home, pinned=False),
            }
            if device.type == "cuda":
                methods["dcp async pinned"] = lambda trainer=trainer: with_dcp(trainer, args.steps, home, pinned=True)
            for name, method in methods.items():
                record["blocked"].append({"gb": gb, "method": name, **method()})
    finally:
        dist.destroy_process_group()
        shutil.rmtree(home, ignore_errors=True)
    if args.json:
        print(json.dumps(record))
        return
    memcpy = record["bandwidth_gb_s"]["memcpy"]
    for name, rate in record["bandwidth_gb_s"].items():
        with contextlib.suppress(ZeroDivisionError):
            print(f"{name:12} {rate:6.2f} GB/s  {rate / memcpy:5.2f} of memcpy")
    for row in record["blocked"]:
        share = row["blocked_s"] / row["step_s"]
        extra = f"  copied {row['copied_bytes'] / 1e9:.2f} GB in {row['copy_s']:.3f} s" if "copy_s" in row else ""
        print(
            f"{row['gb']:4} GB  {row['method']:18} blocked {row['blocked_s'] * 1e3:9.2f} ms "
            f"({share:7.2%} of a step of {row['step_s']:.3f} s){extra}"
        )


if __name__ == "__main__":
    main()
