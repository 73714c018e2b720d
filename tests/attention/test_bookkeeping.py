"""Tests of how often layers are checked, and of the looks that run at any rate."""

import math

import pytest
import torch

from everstep.attention import linear
from everstep.attention.findings import FindingLog, Record
from everstep.attention.injection import Injector
from everstep.attention.schedule import Schedule
from everstep.attention.section import Inject

from .conftest import Bench


@pytest.mark.parametrize(("value", "extreme"), [
    (3.0, False), (1e9, False), (-1e11, True), (math.inf, True), (math.nan, True)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_extreme_result_of_a_projection_refuses_its_slot_at_any_rate(value, extreme, dtype):
    """Here nothing else is checked, and the projection runs as if it had no guard."""
    bench = Bench(frequency=0.0)
    bench.checks.injector = Injector(Inject())
    w = torch.eye(64, dtype=dtype)
    x = torch.zeros(8, 64, dtype=dtype)
    x[3, 5] = value
    bench.checks.begin(4, 2)
    linear.linear(x, w, None, bench.guard)
    assert bench.checks.refused() == ({2} if extreme else set())


@pytest.mark.parametrize("frequency", [0.0, "adaptive"])
def test_nothing_is_checked_between_slots(frequency):
    """A validation runs the same modules, but does not ask for their findings."""
    bench = Bench(frequency=frequency)
    weight = torch.eye(64, requires_grad=True)
    for step in (1, 2):
        for _ in range(3):
            linear.linear(torch.full((8, 64), math.nan), weight.detach(), None, bench.guard)
        bench.checks.begin(step, 0)
        linear.linear(torch.ones(8, 64), weight, None, bench.guard).sum().backward()
        bench.checks.end()
        assert bench.checks.refused() == set()
        assert bench.checks.findings.drain() == []


@pytest.mark.parametrize(("first", "second", "refused"), [
    ("corrected", "refused", {0}), ("refused", "corrected", {0}), ("corrected", "corrected", set()),
])  # fmt: skip
def test_of_two_passes_the_one_that_repaired_less_counts(first, second, refused):
    """The second pass of activation checkpointing feeds the backward."""
    log = FindingLog()
    for again, action in ((False, first), (True, second)):
        log.record(Record(1, 0, 3, "wqkv.y", action, again, torch.tensor(5.0)))
    assert log.refused() == refused


def trained(schedule, layers, slots, took_s=0.1, looks_s=0.0):
    """Return the seconds that checks take in each slot. A slot takes a second without them and without looks."""
    for layer in range(layers):
        schedule.add(layer)
    spent = []
    for slot in range(slots):
        schedule.begin(slot // 2 + 1, slot % 2)
        spent.append(took_s * len(schedule.checked))
        schedule.slot_took(1.0 + spent[-1] + looks_s, spent[-1], len(schedule.checked), looks_s)
    return spent


@pytest.mark.parametrize(("ceiling", "looks_s"), [(0.01, 0.0), (0.1, 0.0), (0.5, 0.0), (0.1, 0.04)])
def test_an_adaptive_rate_takes_the_share_of_the_time_that_it_may_take(ceiling, looks_s):
    schedule = Schedule(None, ceiling)
    spent = trained(schedule, 20, 600, looks_s=looks_s)[40:]
    assert sum(spent) / len(spent) == pytest.approx(ceiling - looks_s, rel=0.15)
    assert schedule.check_rate.overhead == pytest.approx(ceiling)


def test_a_layer_is_still_drawn_at_times_if_looks_take_all_of_max_overhead():
    schedule = Schedule(None, 0.01)
    spent = trained(schedule, 20, 2000, looks_s=0.02)[40:]
    assert sum(map(bool, spent)) == pytest.approx(len(spent) / 64, rel=0.3)


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 3), (0.0, 0)])
def test_rates_one_and_zero_are_exact_and_a_slot_in_doubt_is_checked_whole(rate, expected):
    schedule = Schedule(rate)
    trained(schedule, 3, 0)
    for slot in range(20):
        schedule.begin(1, slot)
        assert len(schedule.checked) == expected
    schedule.begin(1, 0, check_all=True)
    assert len(schedule.checked) == 3
