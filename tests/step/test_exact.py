"""Exact sums have the same bits in every order of slots and groups, also after slots were dropped."""

from unittest.mock import Mock

import pytest
import torch

from everstep.quorum.errors import SumsBroken
from everstep.step import exact
from everstep.step.reduction import GradientReducer
from step.test_reduction import WAIT, OneGroup

SLOTS = 12


def made(exact_slots=SLOTS):
    """Return parameters, sums over a single group, and a reducer of the parameters."""
    params = [*map(torch.nn.Parameter, (torch.zeros(40, 30), torch.zeros(70_000), torch.zeros(24, 16).t()))]
    return params, OneGroup(), GradientReducer(params, bucket_bytes=1 << 16, exact_slots=exact_slots)


def backward(params, slot, bad=0.0):
    """Run backward of a slot, with gradients over ten orders of magnitude. The first parameter is used twice in each
    slot, the second one not in every slot. `bad`: added to one of its elements."""
    draw = torch.Generator().manual_seed(slot)
    weights = [
        torch.randn(p.shape, generator=draw) * 10 ** torch.empty(p.shape).uniform_(-9, 1, generator=draw)
        for p in params
    ]
    (params[0] * weights[0]).sum().backward()
    (params[0] * weights[0].flip(0)).sum().backward()
    weights[1][-1] += bad
    if slot % 3 or bad:
        (params[1] * weights[1]).sum().backward()
    (params[2] * weights[2]).sum().backward()


def compute(reducer, params, slots, *, last, bad=(None, 0.0)):
    """Compute slots of an attempt, whose last one is `last`. `bad`: a slot, and a value to add to its gradient."""
    for slot in slots:
        reducer.begin_slot(last=slot == last)
        backward(params, slot, bad[1] if slot == bad[0] else 0.0)
        reducer.end_slot()


def attempt(reducer, params, sums, slots, **bad):
    """Make a whole attempt: compute its slots and sum."""
    reducer.begin(sums, WAIT)
    compute(reducer, params, slots, last=slots[-1] if slots else None, **bad)
    reducer.finish()


def summed(shares, *, scale=0.37, exact_slots=SLOTS, refused=()):
    """Return each group's gradients of a step. A group with a slot of `refused` computes its share a second time."""
    reducers = []
    for share in shares:
        params, sums, reducer = made(exact_slots)
        if set(share) & set(refused):
            reducer.begin(OneGroup(), WAIT)
            compute(reducer, params, share, last=None)
            reducer.forget()
            for param in params:
                param.grad = None
        attempt(reducer, params, sums, share)
        reducers.append((reducer, sums.parts, params))
    totals = [sum(parts[1:], parts[0].clone()) for parts in zip(*(parts for _, parts, _ in reducers), strict=True)]
    for reducer, parts, _ in reducers:
        for part, total in zip(parts, totals, strict=True):
            part.copy_(total)
        assert reducer.finite()
        assert reducer.own_finite()
        reducer.assign(scale)
    return [[p.grad for p in params] for _, _, params in reducers]


def test_the_sum_has_the_same_bits_whoever_computed_what_in_whatever_order():
    two, four = [[11, 3, 5, 0, 7], [1, 2, 4, 6, 8, 9, 10]], [[10, 2], [9, 8, 7, 6], [5, 4, 3], [0, 1, 11]]
    shares = [[[*range(SLOTS)]], two, four]
    one, *others = [summed(share) for share in shares] + [summed(shares[1], refused=[4])]
    for group in [group for found in others for group in found]:
        for a, b in zip(one[0], group, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    floats = [summed(share, exact_slots=0)[0] for share in shares]
    assert not all(torch.equal(a, b) for a, b in zip(floats[0], floats[1], strict=True)), "floats tell orders apart"
    for ours, plain in zip(one[0], floats[0], strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_a_retry_goes_on_with_what_is_held_also_if_data_ends_before_the_last_slot():
    """As after a member's death: a sum was made and failed, and is made again with one more slot."""
    params, sums, reducer = made()
    attempt(reducer, params, sums, range(5))
    attempt(reducer, params, sums, [5])
    reducer.begin(sums, WAIT)
    compute(reducer, params, range(6, SLOTS - 1), last=None)
    reducer.begin_slot(last=True)
    reducer.finish()
    reducer.assign(0.37)
    for ours, whole in zip(params, summed([list(range(SLOTS - 1))])[0], strict=True):
        assert torch.equal(ours.grad, whole)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38, exact.most_of_slot(SLOTS) * 1.01])
@pytest.mark.parametrize("at", [0, SLOTS - 1])
def test_what_has_no_place_in_the_sum_is_seen_by_every_group(bad, at):
    params, sums, reducer = made()
    attempt(reducer, params, sums, range(SLOTS), bad=(at, bad))
    assert not reducer.own_finite()
    assert not reducer.finite()
    reducer.forget()
    assert reducer.own_finite()


def test_a_forgotten_slot_is_not_in_the_sum_of_an_attempt_without_slots():
    """As if the refused slot was dealt to another group, and this one has nothing else to compute."""
    params, sums, reducer = made()
    for slots in ([1], []):
        sums.parts.clear()
        attempt(reducer, params, sums, slots, bad=(1, float("nan")))
        assert reducer.finite() == (not slots)
        reducer.forget()
    assert all(not part.any() for part in sums.parts)


def test_a_rank_may_have_no_part_of_any_parameter_of_a_bucket():
    """FSDP shards of a small parameter may be empty."""
    params, sums = [torch.nn.Parameter(torch.zeros(0, 4)), torch.nn.Parameter(torch.zeros(3))], OneGroup()
    reducer = GradientReducer(params, bucket_bytes=0, exact_slots=SLOTS)
    reducer.begin(sums, WAIT)
    for slot in range(3):
        reducer.begin_slot(last=slot == 2)
        (params[0].sum() + (params[1] * 2.0).sum()).backward()
        reducer.end_slot()
    reducer.finish()
    assert reducer.own_finite()
    assert reducer.finite()
    reducer.assign(1.0)
    assert params[1].grad.tolist() == [6.0] * 3


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("last", [2, 4])
def test_a_gradient_that_is_added_to_once_more_than_before_is_computed_again(last, broken):
    """Also if the sums are broken by then. Nothing of the gradient is lost; it is computed again only once."""
    found = []
    for attempts in (1, 2):
        params, sums, reducer = made()
        if broken and attempts == 1:
            sums.start = Mock(side_effect=SumsBroken("a member is gone"))
        for _ in range(attempts):
            reducer.forget()
            reducer.begin(sums, WAIT)
            for slot in range(last + 1):
                reducer.begin_slot(last=slot == last)
                backward(params, slot)
                if slot == 2:
                    (params[2] * 3.0).sum().backward()
                reducer.end_slot()
            found.append(reducer.own_finite())
    assert found == [False, False, True]
    reducer.finish()
    assert reducer.finite()


def empty(count):
    return torch.full((count,), exact.OFFSET, dtype=torch.float64)


@pytest.mark.parametrize("slots", [1, SLOTS, 1024])
def test_the_largest_gradients_of_all_slots_have_room(slots):
    """Also if one of them is the next smaller float: none of its bits is lost."""
    most = exact.most_of_slot(slots)
    for sign in (1.0, -1.0):
        values, into = torch.full((3,), sign * most), empty(3)
        for _ in range(slots - 1):
            exact.add(into, values)
        exact.add(into, values.nextafter(torch.zeros(3)))
        assert (into - exact.OFFSET).tolist() == [sign * most * (slots - 2.0**-24)] * 3


def test_a_value_halfway_between_two_quanta_is_rounded_alike_in_every_sum():
    """In vectorised loops and in their remainders, contiguous or not, for all magnitudes at which halves exist."""
    halves = torch.arange(1, 200, 2) * 2.0**-41
    large = torch.tensor([2.0**10, 1.0, 0.5, 2.0**-17 + 2.0**-40])
    values = torch.cat([halves, -halves, large.nextafter(torch.zeros(4)), large])
    alone = empty(len(values))
    exact.add(alone, values)
    expected = torch.sign(values) * torch.floor(values.double().abs() * 2.0**40 + 0.5)
    assert torch.equal((alone - exact.OFFSET) * 2.0**40, expected)
    for quanta in (1, 2, 3, -5):
        start = torch.full((3, len(values)), exact.OFFSET + quanta * 2.0**-40, dtype=torch.float64)
        exact.add(start[0], values)
        exact.add(start.T[:, 1], values)
        for index, value in enumerate(values):
            exact.add(start[2][index], value)
        assert torch.equal(start - quanta * 2.0**-40, alone.expand(3, -1))
