"""Tests of the score of whole runs, read from run directories."""

import json

import pytest

from everstep.commands.report import report
from everstep.report.account import read
from everstep.report.score import broken_promises, figures_of, loss_by_step, score, summary
from timeline import Timeline, finished_run


def test_a_run_that_survived_a_kill_keeps_the_promise():
    account = read(finished_run().events)
    figures, losses = figures_of(account), loss_by_step(account.lineage.final())
    expected = {
        "status": "done", "wall_s": 11, "training_s": 9.5, "sessions": 1, "groups": 3, "steps_asked": 8,
        "steps": 8, "first_step": 1, "last_step": 8, "steps_unseen": 0, "commits_dropped": 0, "attempts": 9,
        "attempts_thrown_away": 0, "slots_recomputed": 2, "samples": 192,
        "samples_lost": 0, "samples_repeated": 0, "kills": 1, "deaths_unprovoked": 0,
        "faults": {"kill-worker": 1}, "step_s_median": 1.0, "stalls_unmeasured": 0, "rejoins_open": 0,
        "replicas_diverged": 0, "findings_corrected": 0, "findings_recomputed": 0, "findings_refused": 0,
    }  # fmt: skip
    assert {name: figures[name] for name in expected} == expected
    assert figures["stall_s_median"] == figures["stall_s_max"] == pytest.approx(0.6)
    assert figures["delay_s_max"] == pytest.approx(1.0)
    assert figures["rejoin_s_median"] == figures["rejoin_s_max"] == pytest.approx(4.6)
    assert figures["throughput_kept"] == pytest.approx(8 / 9.5)
    assert figures["ettr"] == pytest.approx(8 / 11), "start-up is part of the wall-clock time"
    assert figures["badput"]["start-up"] == pytest.approx(1 / 11)
    assert figures["badput"]["restarting"] > 0
    assert figures["groups_mean"] == pytest.approx((3 * 1 + 3 * 2 + 2 * 4 + 3 * 2) / 9)
    assert (losses[8], broken_promises(figures)) == (pytest.approx(4.2), [])


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"attempts_thrown_away": 1}, "Attempts that threw work of a survivor away: 1."),
    ({"samples_lost": 8}, "Samples of committed steps that did not enter the model: 8."),
    ({"samples_repeated": 4}, "Samples that entered the model more than once: 4."),
    ({"replicas_diverged": 2}, "Groups that audits found to differ, once per audit: 2."),
    ({"status": "failed", "reason": "no group left"}, "The run is not done: failed, no group left."),
    ({"last_step": 7}, "The run ended at step 7 of 8."),
    ({"steps_unseen": 3}, "Steps that cannot be checked, as the log lacks their commits: 3."),
    ({"loss_delta_steps": 0}, "No step is in both runs, so no loss was compared."),
    ({"loss_delta_undefined": 1}, "Steps whose non-finite losses differ: 1."),
])  # fmt: skip
def test_the_verdict_names_what_broke_the_promise(changes, sentence):
    assert broken_promises(figures_of(read(finished_run().events)) | changes) == [sentence]


def test_a_run_that_is_still_going_or_has_not_begun_can_be_scored(tmp_path):
    empty = score(Timeline().write(tmp_path))
    assert (empty["status"], empty["steps"], empty["goodput"]) == ("running", 0, None)
    assert "No step was committed." in broken_promises(empty)
    assert summary(empty).startswith("run       running after 0.00 s\n")
    run_dir = Timeline().start(0, 0).commit(1, 1, [0]).commit(2, 2, [0]).write(tmp_path)
    with (run_dir / "events" / "group-0.rank-0.jsonl").open("a") as file:
        file.write('{"t": 3.0, "kind": "commit", "group": 0, "ran')
    figures = score(run_dir)
    assert (figures["status"], figures["steps"], figures["training_s"]) == ("running", 2, 2)


def test_how_a_run_that_nobody_supervises_ended_is_what_its_groups_say():
    """This is the case on Slurm, and with torchrun."""
    run, asked = Timeline(), {"steps": 4, "nominal_groups": 3}

    def told():
        figures = figures_of(read(run.events))
        return figures["status"], broken_promises(figures)

    def end(t, group, status, *before):
        for kind in before:
            run.add(t, kind, group, 2)
        run.add(t + 0.5, "agent_ended", group, role="agent", status=status, reason="")

    run.start(1, 0, 1).logged[-1] |= asked
    run.commit(2, 1, [0, 1]).commit(3, 2, [0, 1])
    end(4, 1, "failed")
    assert told() == ("running", ["The run is not done: running."]), "the other group goes on"
    end(5, 0, "stopped", "training_done")
    assert told() == ("stopped", [])
    run.start(100, 0, 1, step=3, source="disk").logged[-1] |= asked
    run.commit(101, 3, [0, 1])
    assert told()[0] == "running", "it was started again"
    assert figures_of(read(run.events))["training_s"] == 101 - 1
    run.add(99, "agent_up", 0, role="agent", pid=1)
    figures = figures_of(read(run.events))
    found = [figures[name] for name in ("sessions", "groups", "wall_s", "training_s")]
    assert found == [2, 3, 5.5 - 1 + 101 - 99, 5 - 1 + 101 - 100], "it was submitted again"
    run.add(102, "training_done", 0, 3)
    assert told() == ("done", ["The run ended at step 3 of 4."])
    run = Timeline().start(1, 0, 1).commit(2, 1, [0, 1])
    end(3, 0, "failed")
    end(3, 1, "failed")
    assert told()[0] == "failed"
    run.add(100, "agent_up", 0, role="agent", pid=1)
    end(101, 0, "failed")
    assert told()[0] == "failed", "with fewer groups and before a step"
    for killed in (False, True):
        run = finished_run()
        run.logged = run.logged[: -1 if killed else None]
        run.add(20, "agent_up", 0, role="agent", pid=1)
        run.start(21, 0, 1, 2, step=9, source="disk").commit(22, 9, [0, 1, 2]).logged[-1] |= {"steps": 9}
        end(23, 0, "done", "training_done")
        assert told() == ("done", []), "after `everstep run`"


def test_a_check_fails_with_the_sentences_that_say_what_broke(tmp_path, capsys):
    kept = finished_run().write(tmp_path / "kept")
    broken = finished_run(loss_shift=0.25).write(tmp_path / "broken")

    def check(*paths, **asked):
        status = report(paths[0], paths[1] if paths[1:] else None, check=True, **asked)
        return status, *capsys.readouterr()

    assert check(kept)[0] == 0
    status, said, complaints = check(broken, kept)
    assert (status, complaints) == (1, "")
    assert "The loss differs by up to 0.25 from the other run's." in said
    assert "steps compared: 8" in said
    status, said, complaints = check(broken, kept, json=True)
    assert (status, json.loads(said)["loss_delta_max"]) == (1, pytest.approx(0.25))
    assert complaints.startswith("The loss differs by up to")
    assert check(broken, json=True)[2] == ""
    huge = finished_run()
    for event in huge.logged:
        event["tokens"] = 1e308
    said = check(huge.write(tmp_path / "huge"), json=True)[1]
    assert said == (tmp_path / "huge" / "report.json").read_text()
    assert json.loads(said)["tokens"] is None, "their sum is no JSON number"
    assert check(kept, Timeline().write(tmp_path / "empty"))[0] == 1
