"""CUDA graphs on a CPU: torchtitan's own wrapper records and replays, and what it records with is imitated.

A capture notes every operation that reaches a kernel, below the operators of ours, with the tensors it was given and
those it made, and runs none of it: what it wrote to is made what it was. A replay runs the noted operations, and no
Python of ours, on the same tensors, and leaves their results in the memory in which the recording left them. Whatever
would wait for a device, or copy from the host, raises while it is recorded.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.distributed import cudagraph

from everstep.attention import fused, operators, product

WAITS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

Hit = Callable[[Any], None]
"""What changes an operation's result before the next one reads it."""


def tensors(values: Any) -> Iterator[torch.Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, torch.Tensor))


def memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def by_name(func: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The arguments that were given by name, as the schema has them."""
    return ((argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs)


class Operations(TorchDispatchMode):
    """Every operation below ours that makes or writes to memory, in order.

    Args:
        hits: by an operation's place in the order what is done to its result.
        recorded: whether the operations are noted, and nothing may wait for one.
    """

    supports_higher_order_operators = True

    def __init__(self, hits: dict[int, Hit] | None = None, *, recorded: bool = False) -> None:
        super().__init__()
        self.hits, self.recorded = hits or {}, recorded
        self.noted: list[tuple[Any, Any, Any, Any]] = []
        self._count = 0
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: set[int] = set()
        self._tickets: list[torch.Tensor] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            with self:
                return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        if func.namespace == "everstep":
            given = zip(func._schema.arguments, args, strict=False)
            self._tickets = [value for argument, value in given if argument.name == "ticket"]
            with self:
                return func.redispatch(BELOW, *args, **kwargs)
        given = {memory(x) for x in tensors((args, kwargs))}
        written = [
            value
            for argument, value in [*zip(func._schema.arguments, args, strict=False), *by_name(func, kwargs)]
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if self.recorded:
            self._refuse(func, args)
            self._keep(written)
        out = func(*args, **kwargs)
        made = {memory(x) for x in tensors(out)} - given
        if not made and not written:
            return out  # a view
        if self.recorded:
            self.noted.append((func, args, kwargs, out))
            self._made |= made
        if self._count in self.hits:
            self.hits[self._count](out)
        self._count += 1
        return out

    def _refuse(self, func: Any, args: Any) -> None:
        waits = func is torch.ops.aten.lift_fresh.default or any(tag in func.tags for tag in WAITS)
        if func is torch.ops.aten.index.Tensor:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if waits and not any(x is ticket for x in args[:1] for ticket in self._tickets):  # tickets are on the host
            raise RuntimeError(f"{func} would wait for the device, or copy from the host")

    def _keep(self, written: Any) -> None:
        for x in tensors(written):
            storage = x.untyped_storage()
            if memory(x) not in self._made and memory(x) not in self._before:
                self._before[memory(x)] = storage, storage.clone()

    def undo(self) -> None:
        """Make what was written to what it was."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    recorded: ClassVar[list["Graph"]] = []

    def __init__(self) -> None:
        self.noted: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.hits: dict[int, Hit] = {}

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for place, (func, args, kwargs, out) in enumerate(self.noted):
            again = func(*args, **kwargs)
            for x, y in zip(tensors(out), tensors(again), strict=True):
                if memory(x) != memory(y):
                    x.copy_(y)
            if place in self.hits:
                self.hits[place](out)


@contextlib.contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    """Stands for torch.cuda.graph."""
    with Operations(recorded=True) as operations:
        yield
    operations.undo()
    graph.noted = operations.noted
    if graph.noted:
        Graph.recorded.append(graph)


@contextlib.contextmanager
def graphs(monkeypatch) -> Iterator[None]:
    """torchtitan records and replays in here."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    cuda = SimpleNamespace(
        CUDAGraph=Graph,
        graph=capture,
        graph_pool_handle=lambda: (0, 0),
        Stream=lambda: stream,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda: stream,
        is_available=lambda: True,
    )
    monkeypatch.setattr(cudagraph, "torch", SimpleNamespace(cuda=cuda, version=torch.version, Tensor=torch.Tensor))
    monkeypatch.setattr(cudagraph, "utils", SimpleNamespace(device_type="cuda"))
    for module in (product, fused, operators):  # which hides from such modes what is computed
        monkeypatch.setattr(module, "unseen_by_checkpointing", contextlib.nullcontext)
    monkeypatch.setattr(operators, "_compiled", lambda function: function)
    Graph.recorded = []
    yield
    cudagraph.cudagraph_teardown()
