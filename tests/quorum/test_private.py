"""The private and experimental names of torch that the room relies on are there."""

from datetime import timedelta

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from everstep.quorum import private


def test_a_communicator_over_gloo_is_made_without_peers_and_reconfigured():
    assert "enable_reconfigure" in (c10d.ProcessGroupGloo.__init__.__doc__ or "")
    for name in ("get_reconfigure_handle", "reconfigure", "get_error", "abort"):
        assert callable(getattr(c10d.ProcessGroupGloo, name))
    options = c10d.ReconfigureOptions()
    assert all(hasattr(options, name) for name in ("uuid", "handles", "timeout"))
    sum_options = c10d.AllreduceOptions()
    assert all(hasattr(sum_options, name) for name in ("reduceOp", "timeout", "asyncOp"))


def test_only_success_is_no_revocation():
    kinds = torch._C._distributed_c10d.ErrorType
    assert not private.revoked(kinds.SUCCESS)
    assert private.revoked(kinds.TIMEOUT)


@pytest.mark.skipif(not hasattr(c10d, "ProcessGroupNCCL2"), reason="a torch without NCCL")
def test_options_of_nccl_take_a_timeout():
    options = private.nccl_options(timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)
    assert options.enable_reconfigure
