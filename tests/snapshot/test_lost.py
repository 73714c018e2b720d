"""What a keeper or copier cannot do: the run goes on without, and says so."""

import numpy as np

from snapshot_cluster import Cluster, in_keepers, wait_until


def test_what_a_keeper_failed_to_verify_does_not_count_as_protected(monkeypatch, tmp_path):
    """The step before was, and its keeper had said so."""
    code = """
        import everstep.snapshot.coding as watch
        plain = watch.BufferReader
        def failing(path):
            reader = plain(path)
            if reader.header() and reader.header().step == 2: raise ArithmeticError('by the test')
            return reader
        if '"group": 0' in ' '.join(sys.orig_argv): watch.BufferReader = failing
    """
    in_keepers(monkeypatch, tmp_path, code)
    with Cluster(3, coding_timeout_s=1.0) as run:
        run.take(1)
        run.commit(2)
        run.wait()
        wait_until(lambda: "ArithmeticError" in run.segment(0).read_notes(0).reason)
        word = run.copiers[0].word()
        assert (word.settled, word.coded, word.published) == (True, False, False)
        run.commit(3)
        assert (0, "snapshot_unprotected", 2) in [(g, kind, step) for g, kind, step, _ in run.events]


def test_a_damaged_copy_is_no_anchor_though_nothing_is_coded(monkeypatch):
    """Else the next snapshot would be written over the only one that can be restored."""
    with Cluster(2, parity=0) as run:
        run.take(1, coded=False)
        plain = np.copyto

        def falsely(target, source):
            plain(target, source)
            target[0] ^= 1

        monkeypatch.setattr(np, "copyto", falsely)
        run.commit(2)
        run.wait()
        run.all_settled()
        assert not any(copier.word().published for copier in run.copiers.values())
        run.commit(3)
        assert {copier.agreed.anchor for copier in run.copiers.values()} == {(1, 1, "")}


def test_an_error_of_any_kind_in_the_copier_costs_a_snapshot_and_not_the_run(monkeypatch):
    with Cluster(1) as run:
        run.commit(1)
        run.wait()

        def none_left(*_, **__):
            raise MemoryError

        with monkeypatch.context() as short:
            short.setattr("everstep.snapshot.copier.pack_own", none_left)
            run.commit(2)
            run.wait()
        failed = [(step, fields["reason"]) for _, kind, step, fields in run.events if kind == "snapshot_failed"]
        assert failed == [(2, "MemoryError")]
        run.commit(3)
        run.copiers[0].close()  # which waits for the copy
        assert run.copiers.pop(0).published == 3
