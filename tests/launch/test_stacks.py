"""Where a hanging rank is, from what it writes of itself."""

import contextlib
import os
import subprocess
import sys
import time

from everstep.launch import flight
from everstep.launch.stacks import Place, collect, place_of, summary
from watched import until

TEXT = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/x/everstep/snapshot/copier.py", line 99 in run

Current thread 0x00007f0000000002 (most recent call first):
  File "/y/torch/distributed/distributed_c10d.py", line 2999 in all_reduce
  File "/y/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/x/everstep/quorum/ranks.py", line 40 in decide
  File "/x/everstep/step/protocol.py", line 300 in next
"""

WAITER = """
import sys, threading
from pathlib import Path
from everstep.launch.stacks import listen
file = listen(Path(sys.argv[1]), 0, int(sys.argv[2]))
def all_reduce():
    print("ready", flush=True)
    threading.Event().wait()
all_reduce()
"""


def test_the_collective_and_our_own_line_are_named():
    assert place_of(3, TEXT) == Place(3, "all_reduce", "quorum/ranks.py:40 decide")


def test_ranks_at_one_place_are_told_together():
    places = [place_of(rank, TEXT) for rank in (0, 2, 3)] + [Place(1, "", "", "stopped (SIGSTOP)")]
    assert summary(places) == (
        "ranks 0, 2, 3 waits for all_reduce in quorum/ranks.py:40 decide; rank 1 is stopped (SIGSTOP)"
    )


MEMBER = """
import os, sys, threading
from pathlib import Path
from everstep.launch.stacks import listen
rank = int(sys.argv[2])
file = listen(Path(sys.argv[1]), 0, rank)
import torch
import torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=3)
for _ in range(2):
    dist.all_reduce(torch.ones(4))
print("ready", flush=True)
if rank != 1:
    dist.all_reduce(torch.ones(17, 3))
threading.Event().wait()
"""


@contextlib.contextmanager
def members(code, folder, count):
    """Processes of a group that are ready, by rank; killed in the end."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(rank)], stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        for process in started:
            assert process.stdout.readline() == b"ready\n"
        yield {rank: process.pid for rank, process in enumerate(started)}
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def test_the_rank_that_did_not_come_to_a_collective_is_named_by_torchs_own_recorder(tmp_path):
    with members(MEMBER, tmp_path, 3) as pids:
        until(lambda: told(tmp_path, pids) and "ranks 0, 2" in told(tmp_path, pids)[0], "both ranks to wait")
        (sentence,) = told(tmp_path, pids)
        assert sentence == (
            "ranks 0, 2 in all_reduce number 3 of group 0 default_pg ([17, 3]), to which rank 1 did not come"
        )
        for rank in pids:
            assert (tmp_path / "logs" / "group-0" / f"flight-recorder-gloo-{rank}").stat().st_size > 100


def told(folder, pids):
    collect(folder, 0, pids, wait_s=20.0)
    return flight.waits({rank: flight.entries_of(flight.dump_path(folder, 0, rank)) for rank in pids})


def test_damaged_dumps_tell_nothing(tmp_path):
    path = tmp_path / "dump"
    assert flight.entries_of(path) == []
    for text in ("", "[]", "{", '{"gloo": 3}', '{"gloo": {"entries": 4}}', '{"gloo": {"entries": [1, null]}}'):
        path.write_text(text)
        assert flight.waits({0: flight.entries_of(path)}) == []
    entry = '{"process_group": ["0", "x"], "collective_seq_id": "3", "profiling_name": "y", "retired": false}'
    path.write_text(f'{{"gloo": {{"entries": [{entry}]}}}}')
    assert flight.waits({0: flight.entries_of(path)}) == []


def test_processes_that_wait_say_where_also_a_second_time(tmp_path):
    with members(WAITER, tmp_path, 2) as pids:
        for _ in range(2):
            begin = time.monotonic()
            places = collect(tmp_path, 0, pids, wait_s=20.0)
            assert time.monotonic() - begin < 15.0, "it does not wait for more than the answers"
            assert [place.collective for place in places] == ["all_reduce", "all_reduce"]
