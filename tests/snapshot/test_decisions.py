"""The pure functions: which step is restorable and from where, and which buffer may be overwritten."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.snapshot.header import Header
from everstep.snapshot.layout import Layout
from everstep.snapshot.parity import Domains
from everstep.snapshot.peers import Held
from everstep.snapshot.restore import pack_own, unpack_own
from everstep.snapshot.sources import decide


def buffer(group, step, kind="data", rank=0, history=1, members=(0, 1, 2), parity=1, sound=True, **changes) -> Held:
    fields: Any = {
        "run": "r", "kind": kind, "group": group, "rank": rank, "ranks": 1, "step": step, "history": history,
        "members": members, "parity": parity, "parity_group": members, "topology": "t", "state_bytes": 900,
        "part": (300 * group, 300 * group + 300), "sections": {}, "sequence": step, "taken_at": float(step),
        "root": f"root-{group}",
    }  # fmt: skip
    if kind == "parity":
        fields |= {"part": (0, 0), "roots": tuple(f"root-{g}" for g in members)}
    return Held(f"host-{group}:1", Header(**{**fields, **changes}), sound)


def everything(step, lost=(), **changes) -> list[Held]:
    return [buffer(g, step, k, **changes) for g in (0, 1, 2) if g not in lost for k in ("data", "parity")]


def test_the_newest_complete_step_comes_first():
    decision = decide([*everything(4), *everything(5)], run="r", ranks=1)
    assert (decision.source, decision.step, decision.reasons) == ("memory", 5, ())
    assert {g: held.address for g, held in decision.columns[0].data.items()} == {g: f"host-{g}:1" for g in (0, 1, 2)}


def test_an_incomplete_step_gives_way_to_the_one_before_with_the_reason():
    decision = decide([*everything(4), buffer(0, 5), buffer(2, 5)], run="r", ranks=1)
    assert (decision.source, decision.step) == ("older", 4)
    assert decision.reasons == ("step 5: rank 0: no keeper has the part of group 1, and no keeper has its parity",)


def test_a_newer_step_is_decoded_rather_than_an_older_one_taken_whole():
    decision = decide([*everything(4), *everything(5, lost=[1])], run="r", ranks=1)
    assert (decision.source, decision.step) == ("parity", 5)
    assert decision.columns[0].missing == (1,)
    assert [[piece.address for piece in pieces] for pieces in decision.columns[0].parity] == [["host-0:1", "host-2:1"]]


def test_a_newer_disk_checkpoint_wins_and_an_older_one_does_not():
    held = everything(4)
    assert decide(held, run="r", ranks=1, disk_step=5).source == "disk"
    assert decide(held, run="r", ranks=1, disk_step=4).source == "disk"
    assert decide(held, run="r", ranks=1, disk_step=3).source == "memory"


def test_with_nothing_left_it_says_so():
    decision = decide([], run="r", ranks=1)
    assert (decision.source, decision.step) == ("nothing", 0)
    assert decision.reasons == (
        "no keeper holds a snapshot of this run that fits",
        "there is no disk checkpoint",
    )


def test_a_step_counts_only_when_every_rank_column_has_it():
    held = [buffer(g, 5, rank=r, ranks=2) for g in (0, 1, 2) for r in (0, 1) if (g, r) != (2, 1)]
    held += [buffer(g, 4, rank=r, ranks=2) for g in (0, 1, 2) for r in (0, 1)]
    decision = decide(held, run="r", ranks=2)
    assert (decision.source, decision.step) == ("older", 4)
    assert "rank 1: no keeper has the part of group 2" in decision.reasons[0]


def test_histories_memberships_and_layouts_are_not_mixed():
    for odd in ({"history": 2}, {"members": (0, 1, 2, 3)}, {"topology": "u"}):
        held = [buffer(0, 5, parity=0), buffer(1, 5, parity=0), buffer(2, 5, **{"parity": 0, **odd})]
        assert decide(held, run="r", ranks=1).source == "nothing"


def test_of_two_histories_of_one_step_the_later_is_taken():
    held = [*everything(5, history=1, taken_at=1.0), *everything(5, history=2, taken_at=2.0)]
    assert decide(held, run="r", ranks=1).history == 2
    assert decide(held[::-1], run="r", ranks=1).history == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "other"}, "belongs to another run"),
        ({"sound": False}, "does not match its checksums"),
    ],
)
def test_what_cannot_be_used_is_named(changes, reason):
    decision = decide(everything(5, **changes), run="r", ranks=1, topologies={0: "t"})
    assert decision.source == "nothing"
    assert any(reason in said for said in decision.reasons)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_order_of_the_answers_does_not_matter(data):
    held = [
        s for s in [*everything(4), *everything(5), *everything(5, history=2, taken_at=9.0)] if data.draw(st.booleans())
    ]
    shuffled = data.draw(st.permutations(held))
    assert decide(held, run="r", ranks=1) == decide(shuffled, run="r", ranks=1)


@settings(max_examples=300, deadline=None)
@given(groups=st.integers(2, 8), parity=st.integers(0, 2), lost=st.sets(st.integers(0, 7)))
def test_exactly_parity_many_lost_keepers_are_survived(groups, parity, lost):
    parity, members = min(parity, groups - 1), tuple(range(groups))
    kinds = ("data", "parity") if parity else ("data",)
    changes: Any = {"members": members, "parity": parity, "state_bytes": 300 * groups}
    held = [buffer(g, 5, kind, **changes) for g in members if g not in lost for kind in kinds]
    gone = len(lost & set(members))
    source = decide(held, run="r", ranks=1).source
    assert source == ("memory" if gone == 0 else "parity" if gone <= parity else "nothing")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([(0, 300), (300, 600), (600, 899)], "bytes 899 to 900 are in no part"),
        ([(0, 300), (300, 600), (300, 900)], "bytes 300 to 600 of 900 are in two parts"),
        ([(0, 300), (310, 600), (600, 900)], "bytes 300 to 310 of 900 are in no part"),
        ([(0, 300), (0, 300), (600, 900)], "bytes 0 to 300 of 900 are in two parts"),
    ],
)
def test_parts_that_do_not_cover_the_state_exactly_once_are_refused(parts, why):
    held = [*everything(4), *(buffer(g, 5, part=part, parity=0) for g, part in enumerate(parts))]
    decision = decide(held, run="r")
    assert (decision.source, decision.step) == ("older", 4)
    assert why in decision.reasons[0]


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
    from everstep.snapshot.parity import part_bounds

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
