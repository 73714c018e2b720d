"""Who comes back while the others make a step that is longer than the join timeout leaves none of them out."""

from everstep.quorum.turns import Turns


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
