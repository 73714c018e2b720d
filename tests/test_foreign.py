"""The private names of other packages that Everstep uses exist. Most would raise an error where they are used if a
release removed them; here are those whose absence nothing else would report."""

import inspect
from datetime import timedelta

import pytest
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torchtitan.models.common import moe

from everstep import foreign
from everstep.quorum.private import nccl_options
from everstep.titan.private import EXPERT_LOADS


def test_what_replaces_nothing_is_an_error():
    class Base:
        pass

    with pytest.raises(AttributeError, match="Base has no _count any more"):
        foreign.replace(Base(), "_count", 0)


def test_names_whose_absence_raises_nothing_exist():
    assert EXPERT_LOADS in inspect.getsource(moe)
    assert "_local_tensor" in DTensor.__slots__


@pytest.mark.skipif(not hasattr(c10d, "ProcessGroupNCCL2"), reason="a torch without NCCL")
def test_options_of_nccl_take_a_timeout():
    options = nccl_options(timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)
    assert options.enable_reconfigure
