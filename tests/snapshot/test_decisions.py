"""The pure functions: which step is restorable and from where, and which buffer may be overwritten."""

import contextlib
import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import wire
from everstep.snapshot.coding import CodingError, Watch, _Waits
from everstep.snapshot.header import Header
from everstep.snapshot.layout import Layout
from everstep.snapshot.parity import Code, Domains, part_bounds
from everstep.snapshot.peers import Held, Neighbours
from everstep.snapshot.restore import pack_own, unpack_own
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment
from everstep.snapshot.sources import Decision, decide


def buffer(group, step, kind="data", rank=0, history=1, members=(0, 1, 2), parity=1, **changes) -> Held:
    fields: Any = {
        "run": "r", "kind": kind, "group": group, "rank": rank, "ranks": 1, "step": step, "history": history,
        "members": members, "parity": parity, "parity_group": members, "topology": "t", "state_bytes": 900,
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


UNCODED = "step 5: rank 0: no keeper has the part of group 1, and no keeper has its parity"


@pytest.mark.parametrize(
    ("held", "disk_step", "found", "reason"),
    [
        ([*everything(4), *everything(5)], None, ("memory", 5), ""),
        ([*everything(4), buffer(0, 5), buffer(2, 5)], None, ("older", 4), UNCODED),
        ([*everything(4), *everything(5, lost=[1])], None, ("parity", 5), ""),
        (everything(4), 5, ("disk", 5), "step 4 in memory is not newer than the disk checkpoint's, 5"),
        (everything(4), 4, ("disk", 4), "not newer"),
        (everything(4), 3, ("memory", 4), ""),
        ([], None, ("nothing", 0), "no keeper holds a snapshot of this run that fits"),
        (two_ranks(4) + two_ranks(5, [(2, 1)]), None, ("older", 4), "rank 1: no keeper has the part of group 2"),
        (odd_one_out(history=2), None, ("nothing", 0), "no keeper has the part"),
        (odd_one_out(members=(0, 1, 2, 3)), None, ("nothing", 0), "no keeper has the part"),
        (odd_one_out(topology="u"), None, ("nothing", 0), "two layouts"),
        (everything(5, run="other"), None, ("nothing", 0), "belongs to another run"),
        (with_parts((0, 300), (300, 600), (600, 899)), None, ("older", 4), "bytes 899 to 900 are in no part"),
        (with_parts((0, 300), (300, 600), (300, 900)), None, ("older", 4), "bytes 300 to 600 of 900 are in two parts"),
        (with_parts((0, 300), (310, 600), (600, 900)), None, ("older", 4), "bytes 300 to 310 of 900 are in no part"),
        (with_parts((0, 300), (0, 300), (600, 900)), None, ("older", 4), "bytes 0 to 300 of 900 are in two parts"),
    ],
)
def test_the_newest_state_that_can_be_had_whole_is_taken_and_why_not_a_newer_one(held, disk_step, found, reason):
    decision = decide(held, run="r", disk_step=disk_step)
    assert (decision.source, decision.step) == found
    assert reason in " ".join(decision.reasons)
    assert bool(reason) == bool(decision.reasons)


def test_what_is_told_to_the_other_ranks_is_the_same_decision():
    held = [buffer(g, 5, kind, rank=r, ranks=2) for g in (0, 2) for kind in ("data", "parity") for r in (0, 1)]
    told = decide(held, run="r")
    assert [[piece.address for piece in pieces] for pieces in told.columns[0].parity] == [["host-0:1", "host-2:1"]]
    assert Decision.from_json(told.to_json(), 1, "t") == replace(told, columns={1: told.columns[1]})
    assert Decision.from_json(told.to_json(), 1, "of another shape") == told


def test_of_two_histories_of_one_step_the_later_is_taken():
    held = [*everything(5, history=1, sequence=1), *everything(5, history=2, sequence=2)]
    for answers in (held, held[::-1]):
        assert decide(answers, run="r").columns[0].any.history == 2


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_order_of_the_answers_does_not_matter(data):
    held = [
        s for s in [*everything(4), *everything(5), *everything(5, history=2, sequence=9)] if data.draw(st.booleans())
    ]
    shuffled = data.draw(st.permutations(held))
    assert decide(held, run="r") == decide(shuffled, run="r")


@settings(max_examples=300, deadline=None)
@given(groups=st.integers(2, 8), parity=st.integers(0, 2), lost=st.sets(st.integers(0, 7)))
def test_exactly_parity_many_lost_keepers_are_survived(groups, parity, lost):
    parity, members = min(parity, groups - 1), tuple(range(groups))
    kinds = ("data", "parity") if parity else ("data",)
    changes: Any = {"members": members, "parity": parity, "state_bytes": 300 * groups}
    held = [buffer(g, 5, kind, **changes) for g in members if g not in lost for kind in kinds]
    gone = len(lost & set(members))
    source = decide(held, run="r").source
    assert source == ("memory" if gone == 0 else "parity" if gone <= parity else "nothing")


def test_lost_members_of_several_parity_groups_are_each_decoded_by_their_own_code():
    members = tuple(range(16))
    held = []
    domains = Domains(members, 8, 1, (0,) * 16)
    for g in members:
        mine = domains.group_of(g)
        changes: Any = {"members": members, "parity_group": mine, "state_bytes": 4800}
        held.append(buffer(g, 5, **changes))
        held.append(buffer(g, 5, "parity", **changes, roots=tuple(f"root-{m}" for m in mine)))
    decision = decide([h for h in held if h.header.group not in (2, 3)], run="r")
    assert (decision.source, decision.columns[0].missing) == ("parity", (2, 3))
    codes = {pieces[0].header.parity_group for pieces in decision.columns[0].parity}
    assert codes == {domains.group_of(2), domains.group_of(3)}
    assert decide([h for h in held if h.header.group not in (2, 4)], run="r").source == "nothing"


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    members=st.integers(1, 5),
)
def test_the_parts_of_all_members_rebuild_the_state(sizes, members):
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
    tensors = {f"t{i}": torch.arange(n).to(dtype) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=False))}
    layout = Layout.of(tensors)
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for index in range(members):
        begin, end = part_bounds(layout.size, members, index)
        for entry, start, stop in layout.pieces(begin, end):
            source = tensors[entry.name].view(-1).view(torch.uint8)[start:stop]
            flat[entry.offset + start : entry.offset + stop] = source
    for name, tensor in Layout.from_json(layout.to_json()).views(flat).items():
        assert torch.equal(tensor, tensors[name])


def test_a_layout_of_another_model_sharding_or_rank_count_has_another_topology():
    base = {"a": torch.zeros(4, 4), "b": torch.zeros(3)}
    topologies = {
        Layout.of(base).topology(0, 1),
        Layout.of({**base, "a": torch.zeros(2, 8)}).topology(0, 1),
        Layout.of({**base, "c": torch.zeros(1)}).topology(0, 1),
        Layout.of({**base, "a": torch.zeros(4, 4, dtype=torch.bfloat16)}).topology(0, 1),
        Layout.of(base).topology(0, 2),
    }
    assert len(topologies) == 5
    assert Layout.of(dict(reversed(base.items()))).topology(0, 1) == Layout.of(base).topology(0, 1)


def test_meta_and_blobs_come_back():
    meta, blobs = {"lr": [1e-3], "deep": {"x": None}}, {"a": b"\0\1", "empty": b""}
    whose = {"run": "r", "step": 3, "history": 7, "group": 1, "rank": 0}
    packed = pack_own(meta, blobs, **whose)
    assert unpack_own(packed, **whose) == (meta, blobs)
    for name in whose:
        with pytest.raises(ValueError, match=r"it is of .* not of"):
            unpack_own(packed, **{**whose, name: "another"})


class Absent(Neighbours):
    """Of group 2 the part is not there yet, and the keeper of group 0 does not answer before the deadline."""

    def open(self, group, rank, identity, deadline):
        if group == 0:
            time.sleep(deadline - time.monotonic())
        raise wire.WireError("it does not hold it" if group == 2 else "it was silent")


def test_not_the_first_that_is_absent_is_named_but_the_one_that_most_of_the_time_went_to():
    segment = Segment(Path("/nowhere"), "r", 1, Path("/nowhere/r"))
    watch = Watch(segment, 0, Snapshot(), Absent(Path("/nowhere"), b""), threading.Event())
    own, waits = buffer(1, 5).header, _Waits(time.monotonic() + 0.3)
    with pytest.raises(CodingError, match="the part of group 0 did not come in time") as raised:
        watch._givers(own, Code(own.parity_group, 1), waits, contextlib.ExitStack())
    assert raised.value.group == 0
