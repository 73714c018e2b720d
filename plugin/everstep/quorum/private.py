"""Private and experimental names of torch that this room relies on, each with what it is for.

The tests of this room, and tests/test_foreign.py, fail if a release takes one away.
"""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from everstep.foreign import replace


def revoked(error: Any) -> bool:
    """Whether what a communicator over NCCL says of itself (`get_error`) is that it is of no use any more."""
    return error != torch._C._distributed_c10d.ErrorType.SUCCESS


def nccl_options(timeout: timedelta) -> Any:
    """Options of a communicator over NCCL that is made without peers, and whose messages take `timeout` at most."""
    options = c10d.ProcessGroupNCCL.Options()
    options.enable_reconfigure = True
    replace(options, "_timeout", timeout)
    return options
