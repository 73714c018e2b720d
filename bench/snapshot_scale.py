"""Measure how long one rank needs to restore its state from host memory in a run of a thousand groups of eight ranks.

    python bench/snapshot_scale.py [--groups 1000] [--ranks 8] [--off 100] [--mb 8]

All of it runs on one machine. The rank is restored by the real code, which asks every host. The keepers are simulated:
servers in a few processes that answer over the real protocol for headers, parts and parity of all ranks of their group.
`--off` hosts accept connections and never answer. `transfer_at_1_gb_s` is the time of the fetched bytes at 1 GB/s.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic_core import to_json

from everstep import wire
from everstep.run.token import run_token
from everstep.snapshot import parity, peers, recovery
from everstep.snapshot.buffer import chunk_digests, root_of
from everstep.snapshot.header import Header, headers_to_json
from everstep.snapshot.layout import Layout
from everstep.snapshot.parity import Code, Domains, part_bounds
from everstep.snapshot.restore import pack_own
from everstep.snapshot.segment import run_id

STEP = 7
SERVERS = 8
"""Processes that the simulated keepers share."""
PATIENCE = timedelta(seconds=10)
TIMEOUT = timedelta(seconds=10)


@functools.lru_cache(maxsize=20_000)
def parity_group(groups: int, group: int) -> tuple[int, ...]:
    """Return the parity group of a group, if each group is on a separate host."""
    return Domains(tuple(range(groups)), 8, 1, tuple(range(1, groups + 1))).group_of(group)


def state_of(rank: int, nbytes: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {f"param/{i}": torch.randn(nbytes // 16, generator=generator) for i in range(4)}


class Light:
    """A simulated keeper of one group. It holds no segment: it computes each buffer when a client opens it."""

    def __init__(self, run: str, token: bytes, groups: int, ranks: int, state_bytes: int, group: int) -> None:
        self._run, self._groups, self._ranks = run, groups, ranks
        self._bytes, self._group = state_bytes, group
        held = [self._held(kind, rank)[0] for kind in ("data", "parity") for rank in range(ranks)]
        # Encoded only once, because here hundreds of keepers share the machine's cores with the rank that asks them.
        self._inventory = to_json({"buffers": headers_to_json(held)})
        self.server = wire.Server("127.0.0.1", token, self._talk, TIMEOUT)

    def _talk(self, channel: wire.Channel) -> None:
        message: dict[str, Any] | None = channel.receive_frame()
        while message is not None:
            if message["op"] == "inventory":
                channel.send_frame(self._inventory)
                message = channel.receive_frame()
            else:
                header, payload = self._held(message["kind"], message["rank"])
                channel.send_frame({"header": header.to_json()})
                table = chunk_digests(payload.data)
                message = wire.serve_ranges(channel, wire.Pieces([payload.data, table.view(np.uint8).data]))

    def _held(self, kind: str, rank: int) -> tuple[Header, np.ndarray]:
        part = part_of(self._run, self._groups, self._ranks, self._bytes, self._group, rank)
        return (
            part if kind == "data" else parity_of(self._run, self._groups, self._ranks, self._bytes, self._group, rank)
        )


@functools.lru_cache(maxsize=16)
def _flat(rank: int, nbytes: int) -> tuple[Layout, np.ndarray]:
    tensors = state_of(rank, nbytes, STEP)
    layout = Layout.of(tensors)
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return layout, flat.numpy()


@functools.lru_cache(maxsize=20_000)
def part_of(run: str, groups: int, ranks: int, nbytes: int, group: int, rank: int) -> tuple[Header, np.ndarray]:
    """Return header and payload of a group's part, as its copier would publish them."""
    layout, flat = _flat(rank, nbytes)
    mine, part = parity_group(groups, group), part_bounds(layout.size, groups, group)
    about = {"run": run, "step": STEP, "history": 1, "start": "", "group": group, "rank": rank}
    own = pack_own({"step": STEP}, {}, **about, state_bytes=layout.size, part=list(part))
    described = json.dumps(layout.to_json(), separators=(",", ":")).encode()
    size = part[1] - part[0]
    payload = np.concatenate([flat[part[0] : part[1]], np.frombuffer(own + described, dtype=np.uint8)])
    header = Header(
        run=run, kind="data", group=group, rank=rank, ranks=ranks, step=STEP, history=1,
        shared_by=((0, groups - 1),), parity=1, parity_group=mine, topology=layout.topology(rank, ranks),
        state_bytes=layout.size, part=part,
        sequence=1, payload_bytes=len(payload), last_section=size + len(own), root=root_of(chunk_digests(payload.data)),
    )  # fmt: skip
    return header, payload


@functools.lru_cache(maxsize=20_000)
def parity_of(run: str, groups: int, ranks: int, nbytes: int, group: int, rank: int) -> tuple[Header, np.ndarray]:
    """Return header and payload of a group's parity, as its keeper would publish them."""
    mine = parity_group(groups, group)
    parts = {g: part_of(run, groups, ranks, nbytes, g, rank) for g in mine}
    code = Code(mine, 1)
    length = code.shard_bytes([header.payload_bytes for header, _ in parts.values()])
    roots = tuple(header.root for header, _ in parts.values())
    stripe = code.stripe_coded_by(group, 0)
    shards = []
    for giver in code.columns(stripe):
        shard = parity.aligned_bytes(length)
        at = code.stripes_of(giver).index(stripe) * length
        piece = parts[giver][1][at : at + length]
        shard[: len(piece)], shard[len(piece) :] = piece, 0
        shards.append(shard)
    out = parity.aligned_bytes(length)
    parity.combine([[1] * len(shards)], shards, [out])
    covers = json.dumps(headers_to_json([parts[g][0] for g in mine])).encode()
    payload = np.concatenate([out, np.frombuffer(covers, dtype=np.uint8)])
    own = parts[group][0]
    values: dict[str, Any] = {
        **own.__dict__, "kind": "parity", "part": (0, 0),
        "roots": roots,
        "last_section": length, "payload_bytes": len(payload),
        "root": root_of(chunk_digests(payload.data)),
    }  # fmt: skip
    values.pop("identity", None)
    return Header(**values), payload


def serve(run: str, token: bytes, mine: list[int], groups: int, ranks: int, nbytes: int, told: Any) -> None:
    """Run simulated keepers of the groups `mine` in this process, until told to end."""
    lights = {group: Light(run, token, groups, ranks, nbytes, group) for group in mine}
    told.send({group: light.server.address for group, light in lights.items()})
    told.recv()


def restoring(groups: int, ranks: int, off: int, state_bytes: int, home: Path) -> dict[str, Any]:
    """Restore one rank while some hosts are off. Returns the result as fields."""
    run_dir = home / "start"
    run_dir.mkdir(parents=True)
    token = run_token(run_dir)
    run = run_id(token)
    dead = set(range(off))
    alive = [group for group in range(groups) if group not in dead]
    for group in alive:  # before the fork, so that it is computed only once
        for rank in range(ranks):
            parity_of(run, groups, ranks, state_bytes, group, rank)
    context = multiprocessing.get_context("fork")
    pipes, workers = [], []
    for number in range(SERVERS):
        ours, theirs = context.Pipe()
        order = (run, token, alive[number::SERVERS], groups, ranks, state_bytes, theirs)
        workers.append(context.Process(target=serve, args=order, daemon=True))
        workers[-1].start()
        pipes.append(ours)
    addresses: dict[int, str] = {}
    for pipe in pipes:
        addresses |= pipe.recv()
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(4096)
        for group in range(groups):
            address = addresses.get(group, f"127.0.0.1:{mute.getsockname()[1]}")
            path = peers.records_dir(run_dir) / f"group-{group}@host-{group}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            record = peers.KeeperRecord(group, f"host-{group}", address, os.getpid(), "", 1.0)
            path.write_text(json.dumps(vars(record)))
        gc.disable()  # as torchtitan does in a trainer
        began, used = time.monotonic(), time.process_time()
        # Do what rank 0 does: decide for its group and fetch its state. In a real run the other ranks fetch meanwhile.
        found = recovery.recover(
            run_dir, group=groups - 1, rank=0, ranks=ranks, layout=_flat(0, state_bytes)[0], disk_step=None,
            timeout=TIMEOUT, patience=PATIENCE,
        )  # fmt: skip
        took, used = time.monotonic() - began, time.process_time() - used
        assert found.restored is not None, found.decision.reasons
        assert np.array_equal(found.restored.flat, _flat(0, state_bytes)[1]), "the restored state differs"
    for pipe in pipes:
        pipe.send(None)
    for worker in workers:
        worker.join(10)
    transfer_s = found.restored.fetched_bytes / 1e9
    return {
        "hosts": groups,
        "off": off,
        "source": found.decision.source,
        "decoded_groups": len(found.restored.decoded),
        "took_s": took,
        "cpu_s": used,
        "fetched_bytes": found.restored.fetched_bytes,
        "transfer_at_1_gb_s": transfer_s,
        "open_files": resource_files(),
    }


def resource_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of a group")
    parser.add_argument("--off", type=int, default=100, help="hosts that never answer")
    parser.add_argument("--mb", type=float, default=8.0, help="state of a rank in MB")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="everstep-scale-", dir="/dev/shm"))
    try:
        print(json.dumps(restoring(args.groups, args.ranks, args.off, int(args.mb * 1e6), home)))
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
