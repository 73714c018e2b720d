"""What the environment says of GPUs to processes that have not imported PyTorch; what computes on one has
`everstep.quorum.streams`."""

import os

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Which GPUs a process sees, by their numbers or names with commas between them; empty: none."""

LOOK_ONLY = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With "1", PyTorch does not initialise a GPU when it is asked whether there is one: a process that is forked later can
use it."""


def visible(found: int) -> list[str]:
    """Names, as in `VISIBLE`, of the GPUs of which this process sees `found`."""
    names = os.environ.get(VISIBLE, "")
    return names.split(",")[:found] if names else [str(index) for index in range(found)]
