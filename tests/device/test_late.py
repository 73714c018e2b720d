"""The stand-in accelerator: it computes what a CPU does, later, and finds what no event orders."""

import json
import re
import subprocess
import sys

import pytest

from .devices import HERE, environment

CASES = re.findall(r"^    (\w+),$", (HERE / "cases.py").read_text().partition("\nCASES = ")[2], re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[str]]]:
    """By case, the races of the right one, and those with the bug."""
    done = subprocess.run([sys.executable, HERE / "cases.py"], env=environment(), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_planted_bug_is_found_with_both_stacks_and_right_code_is_not_accused(found, case):
    right, planted = found[case]
    assert right == []
    assert planted
    assert all(text.count("RACE") == 1 and text.count("cases.py:") >= 2 for text in planted)
