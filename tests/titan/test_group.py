"""Ranks of a group recognise a process that does not belong to the run."""

import subprocess
import sys

import pytest

from everstep.launch.machine import free_port
from forked import Forked
from watched import environment

ENTER = """
import sys
import torch.distributed as dist
from everstep.titan.group import gather_json, require_members
dist.init_process_group("gloo")
try:
    require_members(sys.argv[1].encode())
    print(gather_json({"rank": dist.get_rank(), "more": "." * dist.get_rank() * 100}))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(("theirs", "said"), [
    ("the run's", "{'rank': 0, 'more': ''}"), ("another", "has the place of rank 1")])  # fmt: skip
def test_a_rank_without_the_runs_token_ends_the_start_with_a_sentence(theirs, said):
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        Forked([sys.executable, "-c", ENTER, token], stdout=subprocess.PIPE, env=environment(RANK=str(rank), **place))
        for rank, token in enumerate(("the run's", theirs))
    ]
    assert said in ranks[0].stdout.read()
