"""Which work is whose: the optimizer steps, slots and layers of a worker's round.

Optimizer steps are numbered from 1 through the run, as in synchronous training: round t (from 1) has steps
(t − 1) h + 1 … t h. A step's global batch has the S slots that it has in synchronous training; worker m has S / M of
them. So a worker's data and seeds depend on round, worker, step and slot alone, on whatever group computes them, and
all workers together read what synchronous training reads.

Of P fragments of the model one is synchronised in each round, in turn (Streaming DiLoCo, arXiv 2501.18512): h = H / P.
"""

import re
from collections.abc import Iterable

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def steps_of(round_: int, steps: int) -> range:
    """Numbers of the optimizer steps of a round, for h = `steps`."""
    return range((round_ - 1) * steps + 1, round_ * steps + 1)


def slots_of(worker: int, slots: int, workers: int) -> range:
    """Which of a step's S = `slots` slots are a worker's, of M = `workers`. S is a multiple of M."""
    each = slots // workers
    return range(worker * each, (worker + 1) * each)


def fragments_of(names: Iterable[str], fragments: int) -> list[int]:
    """To which of P = `fragments` each parameter belongs: those of layer l to fragment l mod P, the paper's strided
    pattern; what the model has before its layers to the first, and after them to the last."""
    found, before = [], True
    for name in names:
        layer = _LAYER.search(name)
        before = before and layer is None
        found.append(int(layer[1]) % fragments if layer else 0 if before else fragments - 1)
    return found
