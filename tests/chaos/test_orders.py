"""A worker's side of the orders about rounds and sums: it dies, and at the moment it was told to."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

from watched import environment


def test_workers_die_at_the_moment_they_are_ordered_to(tmp_path):
    words = [sys.executable, str(Path(__file__).parent / "dying_worker.py"), str(tmp_path)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    middle, adopter, other, in_sum = (ast.literal_eval(line) for line in done.stdout.splitlines())
    died, said = middle
    assert (died, said.splitlines()) == (signal.SIGKILL, [f"(3, {step}, 0)" for step in (11, 12, 13)]), "of five steps"
    died, said = adopter
    *_, last, told = said.splitlines()
    assert (died, last) == (signal.SIGKILL, "(3, 11, 1)"), "worker 1 is one that it did not carry"
    assert told.startswith("('fault', 3) {'fault': 'kill-adopter', 'target_group': 1")
    died, said = other
    assert (died, len(said.splitlines())) == (0, 10), "the order was carried out already"
    assert in_sum == (signal.SIGKILL, "sum on 0\nsum on 0\nsum on -1\n"), "when a sum of gradients had begun"
