"""What stands in for an accelerator computes what the accelerator would."""

import multiprocessing

import torch
import torch.distributed as dist

from everstep.launch.machine import free_port
from everstep.titan import cpu


def exchange(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    sent = [[1, 2], [3, 0]]
    inputs = [torch.full((count, 2), 10.0 * rank + to) for to, count in enumerate(sent[rank])]
    outputs = [torch.zeros(sent[source][rank], 2) for source in range(2)]
    cpu.all_to_all(outputs, inputs)
    results.put((rank, [part[:, 0].tolist() for part in outputs]))


def test_gloo_exchanges_parts_of_uneven_sizes(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=exchange, args=(rank, port, results), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    assert dict(results.get(timeout=400) for _ in ranks) == {0: [[0.0], [10.0] * 3], 1: [[1.0] * 2, []]}
