"""Private and experimental names of torch that this room uses.

The tests of this room and tests/test_foreign.py fail if a release removes one.
"""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from everstep.foreign import replace


def revoked(error: Any) -> bool:
    """Whether `error`, which an NCCL communicator's `get_error` returned, means that its sums must not be used."""
    return error != torch._C._distributed_c10d.ErrorType.SUCCESS


def nccl_options(timeout: timedelta) -> Any:
    """Return options of an NCCL communicator that is created without peers. Its messages take at most `timeout`."""
    options = c10d.ProcessGroupNCCL.Options()
    options.enable_reconfigure = True
    replace(options, "_timeout", timeout)
    return options
