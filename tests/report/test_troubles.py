"""Tests of troubles: each is one sentence, the same wherever a run is looked at, until its cause is gone."""

import pytest
from markupsafe import escape
from prometheus_client.parser import text_string_to_metric_families

from everstep.commands.status import status_of
from everstep.launch.view import RunState
from everstep.report import metrics
from everstep.report.account import Account, read
from everstep.report.troubles import GUARANTEES, SKIPPED
from everstep.run.events import read_events
from timeline import Timeline, page_of

CODED = ("snapshot_protected", {"members": [0, 1], "survives": 1, "exposed": []})
ALONE = ("snapshot_protected", {"members": [0], "survives": 0, "exposed": [0]})
COMMIT = ("commit", {})
STARTED = ("workers_started", {"pids": [7], "incarnation": 1})
DONE = ("agent_ended", {"status": "done", "reason": "its workers finished"})
ENDED = ("agent_ended", {"status": "stopped", "reason": "asked to"})
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
CUT = {"groups": [1], "cut": [[0, 1]]}


def died(reason, error=""):
    return "workers_died", {"reason": reason, "error": error, "exitcodes": {"3": 1}}


def failed(reason):
    return "run_ended", {"status": "failed", "reason": reason}


def skipped(times):
    return [("snapshot_skipped", {"reason": "the last one is not coded yet"})] * times


def commits(count, *, later_s):
    """Return commits of groups 0, 1 and 2, which group 1 dates this much later."""
    return [("commits", {"later_s": later_s})] * count


CAUSES = {
    "no room for a snapshot": (
        "snapshots", [("snapshot_failed", {"reason": "[Errno 28] No space left on device"})],
        "No space left on device. If its host is lost now, a recovery from memory goes back to the last coded", CODED),
    "no room for another rank": ("snapshots", [("snapshot_failed", {"rank": 8, "reason": "-"})], "taken: -.", CODED),
    "a slow group": (
        "snapshots", [("snapshot_unprotected", {"coded_step": 5, "reason": "group 0 did not keep up"})],
        "coded: group 0 did not keep up. If its host is lost now, a recovery from memory goes back to step 5", CODED),
    "snapshots skipped": ("snapshots", skipped(SKIPPED), "none of the last 10 snapshots: the last one is not", CODED),
    "a host less": (
        "hosts", [CODED, ALONE], "It is shared by group 0 only: bring back the groups that are gone, and kill", CODED),
    "a worker's state on a full disk": (
        "workers", [("workers_unprotected", {"reason": "the disk is full", "risk": "group 1 dies"})],
        "If group 1 dies now, the run ends: the disk is full. Make room", ("workers_protected", {})),
    "a full checkpoint folder": (
        "checkpoint", [("checkpoint_failed", {"reason": "/ckpt is full"})],
        "checkpoint of step 4 is missing: /ckpt is full. The run goes on and tries again later. Make room there",
        ("checkpoint_saved", {"took_s": 1.0})),
    "a network in two": ("reach", [("left_out", {"groups": [1, 2], "cut": [[0, 1], [0, 2]]})],
                         "The steps leave out groups 1, 2 until", ("left_out", {"groups": [], "cut": []})),
    "a group of fewer ranks": ("reach", [("left_out", {**CUT, "reason": "the number of ranks differs: group 1 has 1"})],
                               "leave out group 1 until this is fixed: the number of ranks differs: group 1 has 1.",
                               ("left_out", {"groups": [], "cut": []})),
    "another group cut off": ("reach", [("left_out", CUT), ("left_out", {"groups": [2], "cut": [[0, 2]]})],
                              "leave out group 2 until", ("left_out", {"groups": [], "cut": []})),
    "failing alike": ("group", [("group_failing", {"count": 3, "reason": "group 1 failed 3 times", "again_s": 4.0})],
                      "group 1 failed 3 times. It restarts in 4 s. See logs/group-1/rank-0.log.", COMMIT),
    "no date": ("group", [("group_failing", {"count": 3, "reason": "x", "again_s": None})], "restarts in ? s", COMMIT),
    "given up": ("group", [("agent_ended", {"status": "failed", "reason": "group 1 is given up"})],
                 "group 1 is given up. Other groups, if any are left, go on without it. See logs/group-1/.", COMMIT),
    "hung in a sum": ("group", [("workers_stalled", {"stalled_rank": 1, "phase": "reduce", "idle_s": 9.0})],
                      "Group 1 hung: rank 1 made no progress in reduce for 9 s. The group is killed and", COMMIT),
    "a device's memory": ("machine", [died("rank 0 exited with status 1", OOM)],
                          f"Group 1 ran out of memory: {OOM}. It restarts. Lower [training] local_batch", COMMIT),
    "a control group's memory": (
        "machine", [died("rank 0 was killed by SIGKILL, by the kernel: the memory of its control group was used up")],
        "ran out of memory: rank 0 was killed by SIGKILL, by the kernel", COMMIT),
    "memory of PyTorch on a CPU": (
        "machine", [died("rank 0 exited with status 1", "RuntimeError: DefaultCPUAllocator: can't allocate memory")],
        "memory: RuntimeError: DefaultCPUAllocator", COMMIT),
    "no processes": ("machine", [("resource_shortage", {"reason": "Resource temporarily unavailable", "again_s": 2.0})],
                     "group 1: Resource temporarily unavailable. This is retried in 2 s. Free what is short", STARTED),
    "a full disk for the launcher": (
        "machine", [("resource_shortage", {"group": None, "reason": "events: No space left on device", "again_s": 5})],
        "events: No space left on device. This is retried", ("later", {})),
    "a killed lighthouse": ("lighthouse", [("lighthouse_died", {"exitcode": -9, "reason": "ended"})],
                            "The lighthouse died (exit code -9): no group can join",
                            ("lighthouse_started", {"address": "h", "pid": 7})),
    "a lighthouse that cannot be reached": (
        "lighthouse", [("quorum_failed", {"waited_s": 60.0, "reason": "the lighthouse does not answer"})],
        "Group 1 got no quorum in 60 s: the lighthouse does not answer. Check that", COMMIT),
    "a sick device of another rank": (
        "arithmetic", [("unfit", {"rank": 3, "reason": "rank 3 on host a refused a slot"})], "rank 3 on host a", None),
    "other bits": ("arithmetic", [("slot_wrong", {"slot": 3, "groups": [1]})],
                   "Slot 3 of step 4: group 1 computed other bits than two other groups", None),
    "other parameters of two": (
        "arithmetic", [("audit", {"differing": [1, 2]})],
        "The parameters of groups 1, 2 differ from those of the other groups at step 4. A group that differs restarts",
        ("audit", {"differing": []})),
    "NaN in a slot, told by another rank": (
        "finite", [("not_finite", {"rank": 2, "slot": 3, "reason": "no group can do it"})], "Slot 3 of step 4", COMMIT),
    "a NaN gradient": (
        "finite", [("diverged", {"reason": "a gradient is not finite"})],
        "Training diverged at step 4: a gradient is not finite. Begin another run from", COMMIT),
    "poison that ends the run": (
        "data", [("poison_slot", {"slot": 3, "groups": [0, 1], "error": "IndexError: 7", "action": "stop"})],
        "Slot 3 of step 4 ended the workers of groups 0, 1: IndexError: 7. The run ends. Check the data", None),
    "poison that is skipped": (
        "data", [("poison_slot", {"slot": 3, "groups": [0, 1], "error": "IndexError: 7", "action": "skip"})],
        "The slot is skipped, so its tokens are missing from the result.", None),
    "data at its end": (
        "data", [("commit", {}), ("training_done", {}), DONE], "The data ended at step 4 of 9. Provide more", None),
    "data at its end, in a round": (
        "data", [("commit", {"inner_steps": 10, "gradient_bytes": 8}), ("training_done", {}), DONE],
        "The data ended at step 40 of 90.", None),
    "events that were cut off": ("data", [("commit", {}), DONE], "Events are missing in events/: groups", None),
    "a slow host": ("pace", [("straggler", {"pace": 2.25})], "Group 1 is slow: a slot takes it 2.25 times as long",
                    ("straggler", {"pace": 1.0})),
    "a slow host whose workers start again": (
        "pace", [("straggler", {"pace": 1.5})], "so it gets fewer slots. Look for other load", STARTED),
    "a clock that is ahead": (
        "clock", commits(2, later_s=3600.0), "The clocks of groups 0 and 1 differ by 3600 s", ("commits", {})),
    "a clock that is behind": (
        "clock", commits(2, later_s=-90.0), "The clocks of groups 1 and 0 differ by 90 s", ("commits", {})),
    "every group given up": ("run", [failed("every group was given up; group 1 is given up")],
                             "The run failed: every group was given up; group 1 is given up.", None),
    "every group given up, with an error": (
        "run", [died("rank 0 exited with status 1", "KeyError: 'c4'"), failed("every group was given up")],
        "given up. Last error of a worker: KeyError: 'c4'; its log: logs/group-1/rank-3.log.", None),
    "every group given up, for that error": (
        "run", [died("rank 0 exited with status 1", "KeyError: 'c4'"), failed("given up; last: KeyError: 'c4'.")],
        "The run failed: given up; last: KeyError: 'c4'. See logs/group-1/rank-3.log.", None),
    "words that forge a line": (
        "group", [("agent_ended", {"status": "failed", "reason": "lost\r\x1b[1mrun done\nfine"})],
                                "lost\\r\\x1b[1mrun done\\nfine. Other groups", COMMIT),
    "words that are markup": ("snapshots", [("snapshot_failed", {"reason": "<script>alert(1)</script>"})],
                              "not taken: <script>alert(1)</script>.", CODED),
    "words that are a format": ("snapshots", [("snapshot_failed", {"reason": "{group} {0} {nothing!r:>9}"})],
                                "not taken: {group} {0} {nothing!r:>9}.", CODED),
    "too many words": ("group", [("agent_ended", {"status": "failed", "reason": "x" * 100_000})], "xxxx", COMMIT),
    "no words": (
        "snapshots", [("snapshot_failed", {"reason": ""})], "not taken: no reason was given.", CODED),
}  # fmt: skip
"""Cause -> the guarantee, the events, words of the sentence, and the event that ends it (None: it stays)."""


def add(line, t, step, kind, fields):
    fields = dict(fields)
    group, rank = fields.pop("group", 1), fields.pop("rank", 0)
    role = {"run_ended": "supervisor"}.get(kind, "worker" if group is not None else "supervisor")
    if kind == "commit":
        line.commit(t, step, fields.get("groups", (0, 1)))
        line.logged[-1].update(fields)
    elif kind == "commits":
        t += 200.0  # so that a clock that is behind gives no date before the start
        line.commit(t, step, (0, 1, 2), owners=[0, 0, 1, 1, 2, 2])
        line.logged[-2]["t"] += fields.get("later_s", 0.0)
    elif kind == "later":
        line.commit(t + 60.0, step, (0, 1))
    else:
        line.add(t, kind, group, step, role=role, rank=rank, **fields)


def log_of(cause, cured=False):
    guarantee, events, words, cure = CAUSES[cause]
    line, several = Timeline(), events[0][0] == "commits"
    if not several:  # several clocks, too, and so no supervisor
        line.add(1000, "run_started", role="supervisor", groups=3, steps=9)
    line.start(1001, 0, 1, 2).commit(1002, 3, (0, 1, 2))
    for index, (kind, fields) in enumerate(events):
        add(line, 1003 + index, 4 + index * several, kind, fields)
    for index in range(2 if cured and cure else 0):
        add(line, 1020 + index, 20 + index, *cure)
    return line, guarantee, words


@pytest.mark.parametrize("cause", CAUSES)
def test_each_is_the_same_sentence_everywhere(tmp_path, cause):
    line, guarantee, words = log_of(cause)
    line.write(tmp_path)
    events = list(read_events(tmp_path))
    state = RunState()
    console = "\n".join(map(state.apply, events)).splitlines()
    ((key, found),) = state.troubles.now.items()
    assert (key[0], words in found.sentence) == (guarantee, True), found.sentence
    assert found.sentence.isprintable()
    assert len(found.sentence) < 1000
    assert any(text.endswith(f" {found.sentence}") for text in console)
    assert not any(text.startswith("fine") for text in console), "nobody's words forge a line"
    assert f"WRONG   {found.sentence}" in status_of(tmp_path).splitlines()
    assert f"{escape(found.sentence)}</td>" in page_of(tmp_path).read_text()
    families = text_string_to_metric_families(metrics.prometheus_text(state, 1).decode())
    figures = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    count = {name: figures["everstep_degraded", name] for name in GUARANTEES}
    assert count == dict.fromkeys(GUARANTEES, 0) | {guarantee: 1}
    assert figures["everstep_trouble_info", guarantee, found.sentence] == 1


@pytest.mark.parametrize("cause", [cause for cause, (*_, cure) in CAUSES.items() if cure])
def test_a_trouble_ends_with_its_cause(cause):
    now = read(log_of(cause, cured=True)[0].logged)
    assert now.troubles.sentences == []
    assert b"everstep_trouble_info{" not in metrics.prometheus_text(now, 1)


NO_QUORUM = "a lighthouse that cannot be reached"


@pytest.mark.parametrize(("cause", "kind", "fields", "told"), [
    (NO_QUORUM, "commit", {}, False), (NO_QUORUM, "commit", {"groups": (0, 2)}, True),
    *((NO_QUORUM, kind, {"group": group}, group == 0)
      for kind in ("quorum", "left", "training_done", "workers_started") for group in (0, 1)),
    ("a network in two", "commits", {}, False), ("a worker's state on a full disk", *STARTED, False),
    *((cause, *ENDED, False) for cause in ("failing alike", "hung in a sum", "a device's memory")),
])  # fmt: skip
def test_a_trouble_ends_when_its_process_recovers_or_is_replaced(cause, kind, fields, told):
    """Processes that start in its place do not know of the trouble. Events of another group do not end it."""
    line, _, words = log_of(cause)
    add(line, 1020, 20, kind, fields)
    assert any(words in sentence for sentence in read(line.logged).troubles.sentences) is told
    assert told or read(line.logged).troubles.sentences == []


@pytest.mark.parametrize(("begin", "later_s"), [("run_started", 3600.0), ("scaled", 30.0)])
def test_normal_events_make_no_trouble(begin, later_s):
    """Nor do a first snapshot that survives no host, and a clock that is set on the one host of `everstep run`."""
    line = Timeline().add(0, begin, role="supervisor", groups=3, count=3, steps=9).start(1, 0, 1, 2)
    for index, (kind, fields) in enumerate([
        ALONE, ("straggler", {"pace": 1.0}), *commits(3, later_s=later_s),
        *skipped(SKIPPED - 1), CODED, *skipped(SKIPPED - 1), ("quorum_failed", {"waited_s": 4.9, "reason": "a death"}),
        CODED, died("rank 0 was killed by SIGKILL"),
        ENDED, ("audit", {"differing": []}),
        ("left_out", {"groups": [], "cut": []}), ("training_done", {}), ("scaled", {"group": None, "count": 1}), ALONE,
    ]):  # fmt: skip
        add(line, 2 + index, index + 1, kind, fields)
    account = Account()
    assert [sentence for event in line.logged for sentence in account.take(event)] == []


@pytest.mark.parametrize("told", [
    [CODED, *[ALONE] * 5],
    [("snapshot_unprotected", {"coded_step": 5, "reason": "group 0 did not keep up"})] * 3,
    [("audit", {"differing": [2]})],
    [("quorum_failed", {"waited_s": 60.0 + again, "reason": "no answer"}) for again in range(3)],
    [("resource_shortage", {"group": None, "reason": "no room", "again_s": 2.0**again}) for again in range(3)],
    [("straggler", {"group": 1, "pace": pace}) for pace in (1.5, 1.0, 1.75)], commits(3, later_s=3600.0),
], ids=lambda told: told[-1][0])  # fmt: skip
def test_each_is_told_once_whoever_says_it_and_however_often(told):
    line = Timeline().start(1000, 0, 1)
    for step, (kind, fields) in enumerate(told, start=1):
        for group in (0, 1):
            add(line, 1000.0 + step, step, kind, {"group": group} | fields)
    account = Account()
    assert len([sentence for event in line.logged for sentence in account.take(event)]) == 1


def test_a_start_forgets_what_was_and_a_good_end_all_but_data_that_ended():
    line = log_of("no room for a snapshot")[0]
    line.add(1050, "run_ended", role="supervisor", status="stopped", reason="stopped cleanly")
    line.add(1060, "run_started", role="supervisor", groups=3)
    ended = log_of("data at its end")[0].add(1050, "run_ended", role="supervisor", status="done", reason="finished")
    submitted = Timeline().start(1, 0).commit(2, 1, (0,)).add(3, "unfit", 0, 1, reason="rank 0 is sick")
    submitted.add(4, "agent_ended", 0, role="agent", status="stopped", reason="asked to")
    submitted.add(5, "agent_up", 0, role="agent", pid=7)
    for told, left in ((line, 0), (ended, 1), (submitted, 0)):
        assert len(read(told.events).troubles.sentences) == left


def test_a_run_that_is_stopped_or_done_has_not_run_out_of_data():
    line = Timeline().add(0, "run_started", role="supervisor", groups=1, steps=9).start(1, 0).commit(2, 1, (0,))
    line.add(4, "training_done", 0, 1).add(5, "agent_ended", 0, role="agent", status="stopped", reason="asked to")
    assert read(line.events).troubles.sentences == []
    late = log_of("data at its end")[0].add(1050, "run_ended", role="supervisor", status="stopped", reason="asked to")
    assert read(late.events).troubles.sentences == []
    again = Timeline().add(0, "run_started", role="supervisor", groups=1, steps=1).start(1, 0).commit(2, 1, (0,))
    again.add(4, "run_started", role="supervisor", groups=1, steps=1)
    again.add(5, "worker_ready", 0, pid=1, startup_s=1.0, incarnation=0).add(5, "training_done", 0, 0)
    again.add(6, "agent_ended", 0, role="agent", status="done", reason="its workers finished")
    assert read(again.events).troubles.sentences == [], "a start of a run that is done has nothing to do"
