"""What a report says of rounds."""

from everstep.report import score


def commit(step, rank, payload, kept):
    return {
        "kind": "commit", "step": step, "rank": rank, "group": 0,
        "inner_steps": 4, "payload_bytes": payload, "kept_bytes": kept, "gradient_bytes": 1000,
    }  # fmt: skip


def test_bytes_are_of_one_inner_step():
    events = [commit(1, 0, 1000, 0), commit(1, 1, 1000, 800), commit(2, 0, 3000, 800), commit(2, 1, 1000, 0)]
    assert score.exchanged(events) == {
        "inner_steps": 4,
        "payload_bytes": 250.0,  # the median: one round was made twice
        "payload_share": 0.25,  # 1 / H
        "kept_bytes": 200.0,  # all ranks, both rounds, eight inner steps
    }


def test_synchronous_training_has_no_rounds():
    assert set(score.exchanged([]).values()) == {None}
