"""Where a hanging rank is, from what it writes of itself."""

import contextlib
import os
import subprocess
import sys
import time

from everstep.launch.stacks import Place, collect, place_of, summary

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


def test_processes_that_wait_say_where_also_a_second_time(tmp_path):
    with members(WAITER, tmp_path, 2) as pids:
        for _ in range(2):
            begin = time.monotonic()
            places = collect(tmp_path, 0, pids, wait_s=20.0)
            assert time.monotonic() - begin < 15.0, "it does not wait for more than the answers"
            assert [place.collective for place in places] == ["all_reduce", "all_reduce"]
