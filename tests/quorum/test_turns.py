"""Who comes back while the others make a step that is longer than the join timeout leaves none of them out."""

import threading
import time

import pytest

from everstep.quorum.turns import Turns
from quorum.test_gate import Lighthouse, asks

JOIN_S = 5.0
"""The join timeout of the lighthouse there."""


@pytest.fixture
def lighthouse(tmp_path):
    one = Lighthouse(tmp_path)
    yield one
    one.end()


class Asking(threading.Thread):
    def __init__(self, member, group, number):
        super().__init__(daemon=True)
        self.what, self.groups = (member, group, number), None
        self.start()

    def run(self):
        self.groups, _ = asks(*self.what)


def heard(*asking):
    for one in asking:
        one.join(60)
    return [one.groups for one in asking]


def test_nobody_is_left_out_when_one_comes_back_in_a_long_step(lighthouse):
    a, b = lighthouse.member(0), lighthouse.member(1)
    time.sleep(1.0)
    assert heard(Asking(a, 0, 1), Asking(b, 1, 1)) == [[0, 1]] * 2
    c = lighthouse.member(2)
    third = Asking(c, 2, 1)
    time.sleep(JOIN_S + 1)
    first = Asking(a, 0, 2)
    time.sleep(0.3)  # a majority asks, one of them longer than the join timeout
    assert (third.groups, first.groups) == (None, None)
    second = Asking(b, 1, 2)
    assert heard(first, second, third) == [[0, 1, 2]] * 3


def test_when_those_in_the_step_die_the_others_go_on(lighthouse):
    a, b, c = (lighthouse.member(group) for group in range(3))
    time.sleep(1.0)
    assert heard(Asking(a, 0, 1), Asking(b, 1, 1), Asking(c, 2, 1)) == [[0, 1, 2]] * 3
    d = lighthouse.member(3)
    waiting = Asking(d, 3, 1)
    time.sleep(1.0)
    for member in (a, b, c):
        member.leave()
    assert heard(waiting) == [[3]]


def test_one_of_those_that_make_the_step_lets_all_ask():
    alive = {"a", "b", "joiner"}
    turns = Turns(alive.__contains__)
    assert turns.may_pass(), "there was no quorum"
    turns.formed(["a", "b"])
    turns.asked("joiner")
    assert not turns.may_pass(), "its time there would count, and leave out the one that asks last"
    alive.remove("a")
    assert not turns.may_pass()
    turns.asked("b")
    assert turns.may_pass()
    turns.formed(["a"])
    assert turns.may_pass(), "none of them is heard"
    turns.formed([])
    assert turns.may_pass(), "nobody has a state"
