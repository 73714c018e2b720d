"""The pure functions: which step is restorable and from where, and which slot may be overwritten."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.snapshot.copier import Standing, slot_to_overwrite
from everstep.snapshot.ladder import decide
from everstep.snapshot.layout import Layout, buckets
from everstep.snapshot.peers import Held
from everstep.snapshot.restore import pack_own, unpack_own
from everstep.snapshot.slot import Header
from everstep.step.ledger import common_value, life


def slot(group, step, kind="data", rank=0, lineage="a", members=(0, 1, 2), parity=1, sound=True, **changes) -> Held:
    fields: Any = {
        "run": "r", "kind": kind, "group": group, "rank": rank, "ranks": 1, "step": step, "lineage": lineage,
        "members": members, "parity": parity, "topology": "t", "state_bytes": 900,
        "part": (300 * group, 300 * group + 300), "sections": {}, "sequence": step, "taken_at": float(step),
    }  # fmt: skip
    return Held(f"host-{group}:1", Header(**{**fields, **changes}), sound)


def everything(step, lost=(), **changes) -> list[Held]:
    return [slot(g, step, k, **changes) for g in (0, 1, 2) if g not in lost for k in ("data", "parity")]


def test_the_newest_complete_step_comes_first():
    decision = decide([*everything(4), *everything(5)], run="r", ranks=1)
    assert (decision.rung, decision.step, decision.reasons) == ("complete", 5, ())
    assert decision.columns[0].data == {0: "host-0:1", 1: "host-1:1", 2: "host-2:1"}


def test_an_incomplete_step_gives_way_to_the_one_before_with_the_reason():
    decision = decide([*everything(4), slot(0, 5), slot(2, 5)], run="r", ranks=1)
    assert (decision.rung, decision.step) == ("older", 4)
    assert decision.reasons == ("step 5: rank 0: no keeper has the part of group 1, and no keeper has its parity",)


def test_a_newer_step_is_decoded_rather_than_an_older_one_taken_whole():
    decision = decide([*everything(4), *everything(5, lost=[1])], run="r", ranks=1)
    assert (decision.rung, decision.step) == ("decoded", 5)
    assert decision.columns[0].missing == (1,)
    assert decision.columns[0].parity == {0: "host-0:1", 2: "host-2:1"}


def test_a_newer_disk_checkpoint_wins_and_an_older_one_does_not():
    held = everything(4)
    assert decide(held, run="r", ranks=1, disk_step=5).rung == "disk"
    assert decide(held, run="r", ranks=1, disk_step=4).rung == "disk"
    assert decide(held, run="r", ranks=1, disk_step=3).rung == "complete"


def test_a_live_peer_comes_before_all_else():
    assert decide(everything(4), run="r", ranks=1, disk_step=9, live_step=3).rung == "peers"


def test_with_nothing_left_it_says_so():
    decision = decide([], run="r", ranks=1)
    assert (decision.rung, decision.step) == ("nothing", 0)
    assert decision.reasons == (
        "no keeper holds a snapshot of this run that fits",
        "there is no disk checkpoint",
    )


def test_a_step_counts_only_when_every_rank_column_has_it():
    held = [slot(g, 5, rank=r, ranks=2) for g in (0, 1, 2) for r in (0, 1) if (g, r) != (2, 1)]
    held += [slot(g, 4, rank=r, ranks=2) for g in (0, 1, 2) for r in (0, 1)]
    decision = decide(held, run="r", ranks=2)
    assert (decision.rung, decision.step) == ("older", 4)
    assert "rank 1: no keeper has the part of group 2" in decision.reasons[0]


def test_lineages_memberships_and_layouts_are_not_mixed():
    for odd in ({"lineage": "b"}, {"members": (0, 1, 2, 3)}, {"topology": "u"}):
        held = [slot(0, 5, parity=0), slot(1, 5, parity=0), slot(2, 5, **{"parity": 0, **odd})]
        assert decide(held, run="r", ranks=1).rung == "nothing"


def test_of_two_lineages_of_one_step_the_later_is_taken():
    held = [*everything(5, lineage="a", taken_at=1.0), *everything(5, lineage="b", taken_at=2.0)]
    assert decide(held, run="r", ranks=1).lineage == "b"
    assert decide(held[::-1], run="r", ranks=1).lineage == "b"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "other"}, "belongs to another run"),
        ({"ranks": 2}, "taken with 2 ranks per group, and this run has 1"),
        ({"topology": "u"}, "another model or optimizer"),
        ({"sound": False}, "does not match its checksums"),
    ],
)
def test_what_cannot_be_used_is_named(changes, reason):
    decision = decide(everything(5, **changes), run="r", ranks=1, topologies={0: "t"})
    assert decision.rung == "nothing"
    assert any(reason in said for said in decision.reasons)


def test_with_full_copies_any_one_keeper_is_enough():
    held = [slot(g, 5, parity=0, part=(0, 900)) for g in (1,)]
    decision = decide(held, run="r", ranks=1)
    assert (decision.rung, decision.columns[0].missing) == ("complete", ())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_order_of_the_answers_does_not_matter(data):
    held = [
        s
        for s in [*everything(4), *everything(5), *everything(5, lineage="b", taken_at=9.0)]
        if data.draw(st.booleans())
    ]
    shuffled = data.draw(st.permutations(held))
    assert decide(held, run="r", ranks=1) == decide(shuffled, run="r", ranks=1)


@settings(max_examples=300, deadline=None)
@given(groups=st.integers(2, 8), parity=st.integers(0, 2), lost=st.sets(st.integers(0, 7)))
def test_exactly_parity_many_lost_keepers_are_survived(groups, parity, lost):
    parity, members = min(parity, groups - 1), tuple(range(groups))
    kinds = ("data", "parity") if parity else ("data",)
    held = [slot(g, 5, kind, members=members, parity=parity) for g in members if g not in lost for kind in kinds]
    gone = len(lost & set(members))
    rung = decide(held, run="r", ranks=1).rung
    assert rung == ("complete" if gone == 0 else "decoded" if gone <= parity else "nothing")


def standing(sequence, complete=True, sound=True, coded=True, coding=False) -> Standing:
    return Standing(sequence, complete, sound, coded, coding)


def test_an_empty_or_damaged_slot_is_written_first():
    assert slot_to_overwrite([standing(1), None]) == 1
    assert slot_to_overwrite([standing(2, sound=False), standing(1)]) == 0


def test_the_older_slot_goes_once_the_younger_is_complete():
    assert slot_to_overwrite([standing(1), standing(2)]) == 0
    assert slot_to_overwrite([standing(4), standing(3)]) == 1


def test_an_incomplete_younger_slot_goes_before_a_complete_older_one():
    assert slot_to_overwrite([standing(1), standing(2, complete=False)]) == 1


def test_while_the_younger_is_coded_the_last_coded_step_is_not_given_up():
    assert slot_to_overwrite([standing(1), standing(2, coded=False, coding=True)]) is None
    assert slot_to_overwrite([standing(1), standing(2, coded=True, coding=False)]) == 0
    assert slot_to_overwrite([standing(1, coded=False), standing(2, coded=False, coding=True)]) == 0


@given(
    slots=st.lists(
        st.builds(Standing, st.integers(1, 9), st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        min_size=2, max_size=2, unique_by=lambda s: s.sequence,
    )
)  # fmt: skip
def test_a_sound_complete_younger_step_is_never_overwritten(slots):
    younger = max((0, 1), key=lambda i: slots[i].sequence)
    if slots[younger].complete and slots[younger].sound:
        assert slot_to_overwrite(slots) != younger


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    members=st.integers(1, 5),
    limit=st.sampled_from([64, 256, 4096]),
)
def test_the_parts_of_all_members_rebuild_the_state(sizes, members, limit):
    from everstep.snapshot.stripes import part_bounds

    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
    tensors = {f"t{i}": torch.arange(n).to(dtype) for i, (n, dtype) in enumerate(zip(sizes, dtypes, strict=False))}
    layout = Layout.of(tensors)
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for index in range(members):
        begin, end = part_bounds(layout.size, members, index)
        for run in buckets(layout.pieces(begin, end), limit):
            assert len({entry.dtype for entry, _, _ in run}) == 1
            assert run[-1][0].offset + run[-1][2] - run[0][0].offset - run[0][1] <= limit
            for entry, start, stop in run:
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
    assert unpack_own(pack_own(meta, blobs)) == (meta, blobs)


def test_a_common_value_is_told_from_values_that_only_sum_alike():
    assert common_value(21, 147, 3) == 7
    assert common_value(6 + 7 + 8, 36 + 49 + 64, 3) == -1
    assert common_value(-3, 3, 3) == -1


def test_lives_differ_by_group_and_start():
    assert len({life(0, "x/0"), life(1, "x/0"), life(0, "x/1")}) == 3
    assert life(5, "y/3") < 1 << 40
