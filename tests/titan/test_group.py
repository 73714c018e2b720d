"""Ranks of a group tell each other apart from others."""

import multiprocessing

import pytest
import torch.distributed as dist

from everstep.launch.machine import free_port
from everstep.titan.group import StrangerError, gather_json, require_members


def enter(rank, port, token, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        require_members(token)
        results.put((rank, str(gather_json({"rank": rank, "more": "." * rank * 100}))))
    except StrangerError as error:
        results.put((rank, str(error)))


@pytest.mark.parametrize(
    ("theirs", "said"), [(b"the run's", "{'rank': 0, 'more': ''}"), (b"another", "has the place of rank 1")]
)
def test_a_rank_without_the_runs_token_ends_the_start_with_a_sentence(monkeypatch, theirs, said):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "everstep.titan.group"])
    results = context.Queue()
    ranks = [
        context.Process(target=enter, args=(rank, port, token, results), daemon=True)
        for rank, token in enumerate((b"the run's", theirs))
    ]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=400) for _ in ranks)
    assert said in found[0]
