"""Which work is whose: the optimizer steps and slots of a worker's round, and what its inner state is as bytes.

Optimizer steps are numbered from 1 through the run, as in synchronous training: round t (from 1) has steps
(t − 1) H + 1 … t H. A step's global batch has the S slots that it has in synchronous training; worker m has S / M of
them. So a worker's data and seeds depend on round, worker, step and slot alone, on whatever group computes them, and
all workers together read what synchronous training reads.
"""

import struct
from collections.abc import Iterable, Mapping

_PART = struct.Struct("<qqq")


def steps_of(round_: int, sync_steps: int) -> range:
    """Numbers of the optimizer steps of a round, for H = `sync_steps`."""
    return range((round_ - 1) * sync_steps + 1, round_ * sync_steps + 1)


def slots_of(worker: int, slots: int, workers: int) -> range:
    """Which of a step's S = `slots` slots are a worker's, of M = `workers`. S is a multiple of M."""
    each = slots // workers
    return range(worker * each, (worker + 1) * each)


def pack(round_: int, states: Mapping[int, bytes]) -> bytes:
    """The inner states that some workers have after a round, for the other groups."""
    return b"".join(_PART.pack(round_, worker, len(state)) + state for worker, state in sorted(states.items()))


def unpack(notes: Iterable[bytes], round_: int, workers: int, nbytes: int) -> dict[int, memoryview]:
    """The inner state of every worker, out of what all groups have packed.

    Args:
        nbytes: size of each state.

    Raises:
        ValueError: it is not one state of that size for each of the M = `workers` workers, after this round.
    """
    found: dict[int, memoryview] = {}
    for note in notes:
        rest = memoryview(note)
        while rest:
            if len(rest) < _PART.size + nbytes:
                raise ValueError("a worker's inner state is cut off")
            of, worker, size = _PART.unpack(rest[: _PART.size])
            if of != round_ or size != nbytes or not 0 <= worker < workers or worker in found:
                raise ValueError(f"not an inner state: worker {worker} after round {of}, {size} bytes")
            found[worker] = rest[_PART.size : _PART.size + nbytes]
            rest = rest[_PART.size + nbytes :]
    if missing := [worker for worker in range(workers) if worker not in found]:
        raise ValueError(f"the inner states of workers {missing} are missing")
    return found
