"""A guarantee that does not hold is one sentence, the same wherever a run is looked at, until its cause is gone."""

from html import escape

import pytest

from everstep.launch.status import status
from everstep.launch.view import RunState
from everstep.report.metrics import Metrics
from everstep.report.page import write_page
from everstep.report.troubles import GUARANTEES, Troubles, trouble
from everstep.run.events import read_events
from timeline import Timeline

CODED = {"members": [0, 1], "survives": 1, "exposed": []}
TABLE = {
    "no snapshot": ("snapshots", ("snapshot_failed", {"reason": "No space left on device"}),
                    ("snapshot_protected", CODED), "of group 1 is not coded: No space left on device"),
    "not coded": ("snapshots", ("snapshot_unprotected", {"coded_step": 5, "reason": "group 0 did not keep up"}),
                  ("snapshot_protected", CODED), "now goes back to step 5"),
    "workers": ("workers", ("workers_unprotected", {"reason": "the disk is full"}), ("workers_protected", {}),
                "If group 1 dies now, the run ends: the disk is full."),
    "reach": ("reach", ("left_out", {"groups": [1], "cut": [[0, 1]]}), ("left_out", {"groups": [], "cut": []}),
              "no connections between groups 0 and 1. Check the network"),
    "failing": ("group", ("group_failing", {"count": 3, "reason": "group 1 failed 3 times", "again_s": 4.0}),
                ("commit", {}), "Group 1 failed 3 times; it starts again in 4 s. Its log: logs/group-1/rank-0.log."),
    "given up": ("group", ("agent_ended", {"status": "failed", "reason": "group 1 is given up"}), ("commit", {}),
                 "Group 1 is given up. The others go on without it"),
    "lighthouse": ("lighthouse", ("lighthouse_died", {"exitcode": -9}),
                   ("lighthouse_started", {"address": "http://h:1", "pid": 7}), "The lighthouse died (-9)"),
    "memory": ("machine", ("resource_shortage", {"reason": "no memory for a process", "again_s": 2.0}),
               ("workers_started", {"pids": [7], "incarnation": 1}), "Group 1: no memory for a process; it is tried"),
    "wrong": ("arithmetic", ("unfit", {"reason": "rank 0 on host a refused a slot"}), None, "refused a slot."),
    "other bits": ("arithmetic", ("slot_wrong", {"slot": 3, "groups": [1]}), None,
                   "Group 1 computed other bits of slot 3 of step 4 than two others"),
    "NaN": ("finite", ("not_finite", {"slot": 3, "reason": "no group can compute it"}), ("commit", {}),
            "Slot 3 of step 4: no group can compute it."),
}  # fmt: skip


def story(row, cured=False):
    guarantee, (kind, fields), cure, words = TABLE[row]
    told = Timeline().add(0, "run_started", role="supervisor", groups=2).start(1, 0, 1).commit(2, 3, (0, 1))
    told.add(3, kind, 1, 4, **fields)
    if cured and cure and cure[0] == "commit":
        told.commit(4, 5, (0, 1))
    elif cured and cure:
        told.add(4, cure[0], 1, 6, **cure[1])
    return told, guarantee, words


@pytest.mark.parametrize("row", TABLE)
def test_each_is_the_same_sentence_everywhere(tmp_path, row):
    told, guarantee, words = story(row)
    told.write(tmp_path)
    events = list(read_events(tmp_path))
    (found,) = filter(None, map(trouble, events))
    assert (found.guarantee, words in found.sentence) == (guarantee, True), found.sentence
    state, metrics = RunState(2), Metrics(2, 1)
    assert found.sentence in "\n".join(map(state.apply, events)), "console"
    metrics.follow(events)
    count = {name: metrics.registry.get_sample_value("everstep_degraded", {"guarantee": name}) for name in GUARANTEES}
    assert count == dict.fromkeys(GUARANTEES, 0) | {guarantee: 1}
    assert f"WRONG   {found.sentence}" in status(tmp_path).splitlines()
    assert f"<p>{escape(found.sentence).replace('&#x27;', '&#39;')}</p>" in write_page(tmp_path).read_text()


@pytest.mark.parametrize("row", [row for row, (*_, cure, _) in TABLE.items() if cure])
def test_each_is_gone_with_its_cause(row):
    troubles = Troubles()
    for event in story(row, cured=True)[0].events:
        troubles.take(event)
    assert troubles.sentences == []
