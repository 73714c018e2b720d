"""A note is accepted only with the run's token and for the place that it was written for."""

from everstep.quorum.notes import open_note, seal_note

TOKEN, OTHER = bytes(range(32)), bytes(32)


def test_a_note_is_good_for_its_place_only():
    sealed = seal_note(TOKEN, b"5 of 2", b"state")
    assert open_note(TOKEN, b"5 of 2", sealed) == b"state"
    assert open_note(TOKEN, b"5 of 2", seal_note(TOKEN, b"5 of 2", b"")) == b""
    for token, place, note in [
        (OTHER, b"5 of 2", sealed), (TOKEN, b"5 of 3", sealed), (TOKEN, b"5 of 2", sealed[:-1]),
        (TOKEN, b"5 of 2", b"state"), (TOKEN, b"5 of 2", sealed[:-1] + b"x"),
        (TOKEN, b"5 of 2s", sealed.replace(b"state", b"tate")),
    ]:  # fmt: skip
        assert open_note(token, place, note) == b""
