"""The private names of TorchElastic, torch and multiprocessing that the room relies on are there, and do what they are
used for."""

import inspect
import json
from multiprocessing import forkserver
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.multiprocessing.spawn import ProcessContext

from everstep import foreign
from everstep.launch import private


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_torchelastic_has_what_is_relied_on():
    for hook in ("_start_workers", "_stop_workers", "_monitor_workers"):
        assert parameters(getattr(LocalElasticAgent, hook)) == ["self", "worker_group"]
    assert parameters(LocalElasticAgent._exit_barrier) == ["self"]
    assert "self._pcontext = start_processes(" in inspect.getsource(LocalElasticAgent)
    assert "self._pc = " in inspect.getsource(MultiprocessContext)
    assert "self.processes = " in inspect.getsource(ProcessContext)
    assert "spec.max_restarts - self._remaining_restarts" in inspect.getsource(LocalElasticAgent._start_workers)


def test_a_fork_server_has_what_is_relied_on():
    server = forkserver._forkserver
    assert parameters(forkserver.main)[:3] == ["listener_fd", "alive_r", "preload"]
    for name in ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"):
        assert f"self.{name} = " in inspect.getsource(type(server))


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
    agent = SimpleNamespace()
    with pytest.raises(AttributeError, match="_remaining_restarts any more"):
        private.set_restarts_left(agent, 0)
    with pytest.raises(AttributeError, match="LocalElasticAgent has no _begin_workers any more"):

        @foreign.overrides(LocalElasticAgent)
        def _begin_workers(self):
            """Nobody calls it."""
