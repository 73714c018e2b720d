"""Environment variables about GPUs, for processes that have not imported PyTorch. Code that computes on a GPU uses
`everstep.quorum.streams`."""

import os

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable: numbers or names of the GPUs that a process sees, separated by commas; empty: none."""

LOOK_ONLY = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable: with "1" PyTorch does not initialise a GPU to find out whether there is one, so that a process
forked later can still use the GPU."""


def visible(found: int) -> list[str]:
    """Return the names, as in `VISIBLE`, of the `found` GPUs that this process sees."""
    names = os.environ.get(VISIBLE, "")
    return names.split(",")[:found] if names else [str(index) for index in range(found)]
