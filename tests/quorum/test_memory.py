"""The ranks of a host share its free memory, also when all of them look at the same moment."""

import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest

from everstep.quorum import memory

MB = 1 << 20
RANKS, SIZE, FREE = 8, 200 * MB, 1000 * MB


def free_memory(monkeypatch, nbytes):
    host = SimpleNamespace(
        virtual_memory=lambda: SimpleNamespace(available=nbytes), pid_exists=memory.psutil.pid_exists
    )
    monkeypatch.setattr(memory, "psutil", host)


def rank(path, together, granted):
    """Claims at the same moment as the others, and holds what it has got until all have."""
    free_memory(pytest.MonkeyPatch(), FREE)
    together.wait()
    with memory.claimed(SIZE, path) as got:
        if got:
            with granted.get_lock():
                granted.value += 1
        together.wait()


def test_eight_ranks_do_not_take_what_is_there_once(tmp_path):
    context = multiprocessing.get_context("fork")
    together, granted = context.Barrier(RANKS), context.Value("i", 0)
    ranks = [context.Process(target=rank, args=(tmp_path / "claims", together, granted)) for _ in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(30)
    assert 1 <= granted.value <= FREE // SIZE


def test_a_claim_ends_with_its_context_its_process_and_its_time(tmp_path, monkeypatch):
    path = tmp_path / "claims"
    free_memory(monkeypatch, 2 * SIZE)
    with memory.claimed(SIZE, path) as one, memory.claimed(SIZE, path) as other:
        assert (one, other) == (True, False)
    with memory.claimed(SIZE, path) as one:
        assert one

    def die():
        memory.claimed(SIZE, path).__enter__()
        os._exit(0)

    dead = multiprocessing.get_context("fork").Process(target=die)
    dead.start()
    dead.join()
    with memory.claimed(SIZE, path) as one:
        assert one, "its process has ended"
        monkeypatch.setattr(memory, "CLAIM_S", 0.1)
        time.sleep(0.2)
        with memory.claimed(SIZE, path) as other:
            assert other, "what was claimed so long ago shows in the free memory"


@pytest.mark.parametrize("text", ["", "[", "{}", "[[1]]", '[["a", 1, 2]]', "[[1, 2, 3.0]]"])
def test_a_damaged_file_of_claims_claims_nothing(tmp_path, monkeypatch, text):
    path = tmp_path / "claims"
    path.write_text(text)
    free_memory(monkeypatch, 2 * SIZE)
    with memory.claimed(SIZE, path) as one:
        assert one
