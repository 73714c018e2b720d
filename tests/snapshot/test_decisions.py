"""The pure function that says which step is restorable, and from where."""

import json
from typing import Any

import pytest

from everstep.snapshot.header import Header, headers_from_json, headers_to_json, pairs_of
from everstep.snapshot.peers import Held
from everstep.snapshot.sources import Decision, decide


def buffer(group, step, kind="data", rank=0, history=1, members=(0, 1, 2), parity=1, **changes) -> Held:
    fields: Any = {
        "run": "r", "kind": kind, "group": group, "rank": rank, "ranks": 1, "step": step, "history": history,
        "shared_by": pairs_of(members), "parity": parity, "parity_group": members, "topology": "t", "state_bytes": 900,
        "part": (300 * group, 300 * group + 300), "last_section": 300, "payload_bytes": 400, "sequence": step,
        "root": f"root-{group}",
    }  # fmt: skip
    if kind == "parity":
        fields |= {"part": (0, 0), "roots": tuple(f"root-{g}" for g in members)}
    return Held(f"host-{group}:1", Header(**{**fields, **changes}))


def everything(step, lost=(), **changes) -> list[Held]:
    return [buffer(g, step, k, **changes) for g in (0, 1, 2) if g not in lost for k in ("data", "parity")]


def two_ranks(step, lost=()) -> list[Held]:
    ranks = [(g, r) for g in (0, 1, 2) for r in (0, 1) if (g, r) not in lost]
    return [buffer(g, step, rank=r, ranks=2) for g, r in ranks]


def odd_one_out(**changes) -> list[Held]:
    return [buffer(0, 5, parity=0), buffer(1, 5, parity=0), buffer(2, 5, **{"parity": 0, **changes})]


def with_parts(*parts) -> list[Held]:
    return [*everything(4), *(buffer(g, 5, part=part, parity=0) for g, part in enumerate(parts))]


@pytest.mark.parametrize(("held", "disk_step", "found", "reason"), [
    ([*everything(4), *everything(5)], None, ("memory", 5), ""),
    ([*everything(4), buffer(0, 5), buffer(2, 5)], None, ("older", 4),
     "step 5: rank 0: no keeper has the part of group 1, and no keeper has its parity"),
    ([*everything(4), *everything(5, lost=[1])], None, ("parity", 5), ""),
    (everything(4), 5, ("disk", 5), "step 4 in memory is not newer than the disk checkpoint's, 5"),
    (everything(4), 4, ("disk", 4), "not newer"), (everything(4), 3, ("memory", 4), ""),
    ([], None, ("nothing", 0), "no keeper holds a snapshot of this run"),
    (two_ranks(4) + two_ranks(5, [(2, 1)]), None, ("older", 4), "rank 1: no keeper has the part of group 2"),
    (odd_one_out(history=2), None, ("nothing", 0), "no keeper has the part"),
    (odd_one_out(members=(0, 1, 2, 3)), None, ("nothing", 0), "no keeper has the part"),
    (odd_one_out(topology="u"), None, ("nothing", 0), "two layouts"),
    (everything(5, run="other"), None, ("nothing", 0), "belongs to another run"),
    (with_parts((0, 300), (300, 600), (600, 899)), None, ("older", 4), "bytes 899 to 900 are in no part"),
    (with_parts((0, 300), (300, 600), (300, 900)), None, ("older", 4), "bytes 300 to 600 of 900 are in two parts"),
    (with_parts((0, 300), (310, 600), (600, 900)), None, ("older", 4), "bytes 300 to 310 of 900 are in no part"),
    (with_parts((0, 300), (0, 300), (600, 900)), None, ("older", 4), "bytes 0 to 300 of 900 are in two parts"),
])  # fmt: skip
def test_the_newest_state_that_can_be_had_whole_is_taken_and_why_not_a_newer_one(held, disk_step, found, reason):
    decision = decide(held, run="r", disk_step=disk_step)
    assert (decision.source, decision.step) == found
    assert reason in " ".join(decision.reasons)
    assert bool(reason) == bool(decision.reasons)


@pytest.mark.parametrize(("held", "disk_step", "anchor"), [
    ([*everything(4), *everything(5)], None, 5),
    ([*everything(4), *(buffer(g, 5) for g in (0, 1, 2)), buffer(0, 5, "parity")], None, 4),
    ([*everything(4), *(buffer(g, 5) for g in (0, 1, 2))], 4, 5),
    ([*everything(4), *(buffer(g, 5, parity=0) for g in (0, 1, 2))], None, 5),
    ([*everything(4), *everything(5, lost=[1])], None, 5),
    ([*everything(3), buffer(0, 4), buffer(0, 4, "parity"), *(buffer(g, 5) for g in (0, 1, 2))], None, 3),
    ([buffer(0, 4), *(buffer(g, 5) for g in (0, 1, 2))], None, 5),
])  # fmt: skip
def test_a_start_keeps_the_newest_coded_snapshot_until_the_restored_state_is_coded(held, disk_step, anchor):
    """It does not keep a snapshot that is not newer than the disk checkpoint, or that cannot be restored."""
    decision = decide(held, run="r", disk_step=disk_step)
    assert (decision.step, decision.anchor) == (5, (anchor, 1, ""))
    assert Decision.from_json(json.loads(json.dumps(decision.to_json())), 0, "t").anchor == decision.anchor


def test_headers_are_told_by_what_is_other_than_in_the_one_before():
    headers = [held.header for held in everything(5) + two_ranks(6)]
    told = json.loads(json.dumps(headers_to_json(headers)))
    assert headers_from_json(told) == headers
    assert told[3].keys() == {"kind", "part", "roots"}
    for bad in ({"part": [0, 901]}, {"step": "6"}, {"stop": 6}, [], None):
        with pytest.raises(ValueError, match=r"part|step|stop|object"):
            headers_from_json([*told, bad])
