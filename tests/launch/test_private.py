"""The private names of torch that the room relies on are there, and do what they are used for."""

import json

import pytest
import torch.distributed as dist

from everstep import foreign
from everstep.launch import private


def test_a_flight_recorder_tells_what_it_holds():
    as_json, whole = private.flight_records("gloo")
    assert isinstance(json.loads(as_json), dict)
    assert isinstance(whole, bytes)
    assert whole


def test_a_renamed_flight_recorder_is_an_error(monkeypatch):
    monkeypatch.delattr(dist.distributed_c10d.torch._C._distributed_c10d, "_dump_fr_trace_json")
    with pytest.raises(AttributeError, match="_dump_fr_trace_json"):
        private.flight_records("gloo")


def test_what_replaces_or_stands_in_for_nothing_is_an_error():
    class Base:
        pass

    with pytest.raises(AttributeError, match="Base has no _count any more"):
        foreign.replace(Base(), "_count", 0)
    with pytest.raises(AttributeError, match="Base has no _begin any more"):

        @foreign.overrides(Base)
        def _begin(self):
            """Nobody calls it."""
