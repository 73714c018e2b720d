"""The optimizer steps, slots and layers that belong to a worker's round.

Optimizer steps are numbered from 1 throughout the run, as in synchronous training: round t (from 1) has the steps
(t − 1) h + 1 … t h. The global batch of a step has the same S slots as in synchronous training, and each of the M
workers has S / M of them. So a worker's data and seeds depend only on round, worker, step and slot, not on the group
that computes them, and all workers together read the data that synchronous training reads.

Each round synchronises one of P fragments of the model, in turn (Streaming DiLoCo, arXiv 2501.18512): h = H / P.
"""

import re
from collections.abc import Iterable

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def fragments_of(names: Iterable[str], fragments: int) -> list[int]:
    """Return the fragment of each parameter, 0 to P - 1 with P = `fragments`. Parameters of layer l are in fragment
    l mod P, the paper's strided pattern; those before the layers are in the first, those after them in the last."""
    found, before = [], True
    for name in names:
        layer = _LAYER.search(name)
        before = before and layer is None
        found.append(int(layer[1]) % fragments if layer else 0 if before else fragments - 1)
    return found
