"""What is shown of a run is what its events say."""

import json
import os
import subprocess
import sys

from everstep.launch.view import RunState


def commit(step, t, groups=(0, 1), loss=2.0, tokens=100):
    return {
        "kind": "commit",
        "t": t,
        "group": 0,
        "step": step,
        "loss": loss,
        "tokens": tokens,
        "groups": groups,
        "history": f"{step} at {t}",
        "parent": "",
    }


def event(kind, t=0.0, **fields):
    return {"kind": kind, "t": t, "group": None, "rank": None, "step": None, **fields}


def test_a_dead_group_takes_no_part_until_it_commits_again():
    state = RunState(2)
    state.apply(commit(1, 0.0))
    state.apply(event("workers_died", group=1, reason="rank 0 was killed by SIGKILL"))
    assert state.taking_part == {0}
    state.apply(commit(2, 1.0))
    assert state.taking_part == {0, 1}


SHOWN_TO_NOBODY = """
import json, sys
from everstep.launch.view import open_view
show = open_view(1)
for event in json.loads(sys.argv[1]):
    show([event])
"""


def test_a_reader_who_goes_away_ends_the_view_and_nothing_else():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", SHOWN_TO_NOBODY, json.dumps([commit(1, 0.0), commit(2, 1.0)])]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
