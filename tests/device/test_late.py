"""The stand-in accelerator: it computes what a CPU does, later, and finds what no event orders."""

import ast
import json
from pathlib import Path

import pytest

from .devices import HERE, environment, run

LISTED = next(
    node.value
    for node in ast.parse((HERE / "cases.py").read_text()).body
    if isinstance(node, ast.Assign) and node.targets[0].id == "CASES"
)
CASES = [name.id for name in LISTED.elts]


@pytest.fixture(scope="module")
def found() -> dict[str, list[list[str]]]:
    """By case, the races of the right one, and those with the bug."""
    return json.loads(run(HERE / "cases.py", env=environment()).splitlines()[-1])


def test_computes_what_a_cpu_computes_later():
    run(HERE / "operators.py", env=environment())


@pytest.mark.parametrize("case", CASES)
def test_a_planted_bug_is_found_with_both_stacks_and_right_code_is_not_accused(found, case):
    right, planted = found[case]
    assert right == []
    assert planted
    places = 1 if case == "host_reads_device" else 2
    assert all(text.count("RACE") == 1 and text.count("cases.py:") >= places for text in planted)


def test_a_copy_of_a_process_that_used_the_device_cannot_use_it(tmp_path: Path):
    script = tmp_path / "fork.py"
    script.write_text(
        "import os, sys, torch\n"
        "torch.ones(3, device='late').sum().item()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    assert torch.late._is_in_bad_fork()\n"
        "    try:\n"
        "        torch.ones(3, device='late')\n"
        "    except RuntimeError as error:\n"
        "        os._exit(0 if 'forked' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "sys.exit(os.waitpid(pid, 0)[1])\n"
    )
    run(script, env=environment())
