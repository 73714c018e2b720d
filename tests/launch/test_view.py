"""The view of a run shows what its events say."""

import json
import os
import subprocess
import sys

from everstep.commands.status import status_of, watch
from everstep.launch.view import RunState
from timeline import Timeline


def test_a_dead_group_takes_no_part_until_it_commits_again():
    state, line = RunState(), Timeline().commit(0.0, 1, (0, 1))
    line.add(0.5, "workers_died", 1, role="agent", reason="rank 0 was killed by SIGKILL", exitcodes={"0": -9})
    state.show(line.events)
    assert state.taking_part == {0}
    state.apply(line.commit(1.0, 2, (0, 1)).logged[-1])
    assert state.taking_part == {0, 1}


def test_a_view_of_a_long_run_remembers_only_its_newest_commits(monkeypatch):
    monkeypatch.setattr("everstep.launch.view.KEPT_COMMITS", 30)
    state, line = RunState(), Timeline()
    for step in range(1, 100):
        line.commit(float(step), step, (0, 1))
    state.show(line.events)
    assert len(state.lineage.commits) == len(state.lineage.by_history) == len(state.current.commits) == 30
    assert "1.00 s/step" in state.progress()


SHOWN_TO_NOBODY = """
import json, sys
from everstep.launch.view import RunState
from everstep.run.output import keep_on_without_output
keep_on_without_output()  # as a launcher does
RunState().show(json.loads(sys.argv[1]))
"""


def test_a_reader_who_goes_away_or_reads_no_more_ends_the_view_and_nothing_else():
    shown = Timeline().commit(0.0, 1, (0,)).commit(1.0, 2, (0,)).events
    command = [sys.executable, "-c", SHOWN_TO_NOBODY, json.dumps(shown)]
    for make, blocks, is_gone in (
        (os.pipe, False, False), (os.pipe, True, False), (os.openpty, True, False), (os.pipe, True, True),
    ):  # fmt: skip
        read, write = make()
        os.set_blocking(write, False)
        os.write(write, bytes(1 << 20))  # it takes a part of this, and then no more
        os.set_blocking(write, blocks)
        if is_gone:
            os.close(read)
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=30)
        assert os.get_blocking(write) == blocks, "other processes have it as well"
        os.close(write)
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_who_is_behind_misses_nothing():
    patient = "from everstep.run import output; output.PATIENCE_S = 60.0; output.keep_on_without_output(); "
    done = subprocess.run([sys.executable, "-c", patient + "print('x' * (1 << 20))"], stdout=subprocess.PIPE)
    assert len(done.stdout) == (1 << 20) + 1


def test_a_view_of_a_run_that_nobody_supervises_ends_with_it(tmp_path):
    """On Slurm, for instance, or with torchrun."""
    run = Timeline().start(0.0, 0, 1).commit(1.0, 1, (0, 1)).add(2.0, "training_done", 0, 1).write(tmp_path)
    assert watch(run) == 0
    assert "run     done" in status_of(run).splitlines()
