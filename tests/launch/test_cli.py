"""The command line answers at once, and says in one sentence what the user can fix."""

import io
import re
import subprocess
import sys

import pytest

from everstep.cli import COMMANDS, main
from everstep.report.score import broken_promises, score
from everstep.run.events import EventLog
from launched import DEADLINE_S, environment


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path, monkeypatch):
    run_dir, out = tmp_path / "läuft 日", io.BytesIO()
    EventLog(run_dir, None, None, "supervisor").close()
    (run_dir / "token").touch()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "latin-1"))
    with pytest.raises(SystemExit, match="0"):
        main(["stop", str(run_dir)])
    assert "läuft \\u65e5".encode("latin-1") in out.getvalue()


HELPS = """
import contextlib, sys
from everstep import cli
for command in cli.COMMANDS:
    with contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
print("torch" in sys.modules)
"""


def test_every_command_explains_itself_without_torch():
    shown = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True, env=environment(), check=True)
    assert re.findall("^usage: everstep ([a-z]+)", shown.stdout, re.MULTILINE) == list(COMMANDS)
    assert shown.stdout.endswith("False\n")


@pytest.mark.parametrize(("groups", "flags", "starts", "words"), [
    (1, ("--tiny.exit", "2"), 1, ("its configuration is not valid",)),
    (1, ("--tiny.fail_in", "1"), 3, ("its workers failed 3 times", "FileNotFoundError")),
    (3, ("--tiny.fail_in", "1"), 8, ("workers of 3 groups failed", "FileNotFoundError")),
    (3, ("--tiny.fail_in", "6"), 99, ("slot 2 of step 6 ended the workers of group(s) 0, 1, 2", "FileNotFound")),
])  # fmt: skip
def test_a_run_that_cannot_go_on_ends_and_says_why(start, groups, flags, starts, words):
    """For an invalid config, an error in the first step, one that all groups have, and a poison slot."""
    run = start(groups, 1, *flags, "--training.steps", "9")
    assert run.process.wait(DEADLINE_S) == 1
    assert groups <= len(run.events("workers_started")) <= starts
    (ended,) = run.events("run_ended")
    assert ended["status"] == "failed"
    assert all(word in ended["reason"] and word in run.console() for word in words)
    assert "in group 0" not in ended["reason"], "the first line says what it is"


def test_a_slot_that_ends_whoever_computes_it_is_skipped_where_that_is_asked_for(start):
    run = start(3, 1, "--tiny.fail_in", "6", "--tiny.skip", "--training.steps", "9")
    assert run.process.wait(DEADLINE_S) == 0
    (poison,) = run.events("poison_slot")
    assert (poison["step"], poison["slot"], poison["groups"], poison["action"]) == (6, 2, [0, 1, 2], "skip")
    assert "The slot is skipped" in run.console()
    figures = score(run.run_dir)
    assert (figures["give_ups"], figures["slots_skipped"]) == ({}, 1)
    assert any("did not enter the model" in sentence for sentence in broken_promises(figures)), "not in silence"
