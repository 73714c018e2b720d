"""The stand-in accelerator: it computes what a CPU does, later, and finds what no event orders."""

import json
import subprocess
import sys

from .devices import HERE, environment


def test_a_planted_bug_is_found_with_both_stacks_and_right_code_is_not_accused():
    done = subprocess.run([sys.executable, HERE / "cases.py"], env=environment(), stdout=subprocess.PIPE, check=True)
    for case, (right, planted) in json.loads(done.stdout.splitlines()[-1]).items():
        assert right == [], case
        assert planted, case
        assert all(text.count("RACE") == 1 and text.count("cases.py:") >= 2 for text in planted), case
