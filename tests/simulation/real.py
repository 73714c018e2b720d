"""Loads the real code of `everstep.quorum` and `everstep.wire` over a system and a network of virtual time: executes
each module again under another name, where imports of `time`, `threading`, `socket` and the like give the objects of
`simulation.system` and `simulation.network`. Also replaced: sealing and HMAC (checksums), torch's store and
communicators, the lighthouse's client."""

from __future__ import annotations

import builtins
import hmac
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import xxhash
from cryptography.exceptions import InvalidTag

from everstep.step import attempt
from simulation import network, services, system

ROOMS = ("everstep.quorum", "everstep.wire")
PREFIX = "virtual."


class Checked:
    """A sealer whose tag is a checksum over key, place and message."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def _tag(self, record: bytes) -> bytes:
        self._count += 1
        return xxhash.xxh3_128(self._key + self._count.to_bytes(8, "little") + record).digest()

    def seal(self, head: bytes, views: Sequence[memoryview]) -> bytes:
        record = head + b"".join(views)
        return record + self._tag(record)

    def open(self, head: bytes, sealed: memoryview, into: Sequence[memoryview]) -> None:
        body = sealed[:-16]
        if self._tag(head + body) != sealed[-16:]:
            raise InvalidTag
        for view in into:
            view[:], body = body[: view.nbytes], body[view.nbytes :]


_LEAVES: dict[str, Any] = {
    "time": system.time,
    "threading": system.threading,
    "concurrent.futures": system.futures,
    "socket": network.socket,
    "selectors": network.selectors,
    "torchft.coordination": services,
    "everstep.wire.sealing": SimpleNamespace(TAG_BYTES=16, Sealer=Checked),
    "everstep.run.memory": network.memory,
    "hmac": SimpleNamespace(
        digest=lambda key, said, _: 2 * xxhash.xxh3_128(key + said).digest(), compare_digest=hmac.compare_digest
    ),
}
_LEAVES |= {
    name: importlib.import_module(name)
    for name in ("everstep.quorum.errors", "everstep.quorum.request", "everstep.quorum.streams")
}
"""The step protocol imports these three modules too, so both use the same ones."""
_loaded: dict[str, Any] = dict(_LEAVES)


def load(name: str) -> Any:
    """Return the copy of a module of the two rooms, over virtual time."""
    if name in _loaded:
        return _loaded[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    assert spec.origin is not None, name
    module = ModuleType(PREFIX + name)
    module.__file__ = spec.origin
    _loaded[name] = sys.modules[PREFIX + name] = module
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    with open(spec.origin) as file:
        exec(compile(file.read(), spec.origin, "exec"), module.__dict__)  # noqa: S102
    return module


def _import(name: str, scope: Any = None, local: Any = None, names: Sequence[str] = (), level: int = 0) -> Any:
    if name in _LEAVES:
        return _LEAVES[name]
    if names and name in ("everstep", "everstep.quorum"):
        found = {each: f"{name}.{each}" for each in names}
        return SimpleNamespace(**{each: _one(full) for each, full in found.items()})
    if name.startswith(ROOMS):
        return load(name)
    return builtins.__import__(name, scope, local, names, level)


def _one(full: str) -> Any:
    """Return a module that is imported by `from PACKAGE import MODULE`."""
    return load(full) if full.startswith(ROOMS) else importlib.import_module(full)


wire = load("everstep.wire")
gate = load("everstep.quorum.gate")
membership = load("everstep.quorum.membership")
process_group = load("everstep.quorum.process_group")
heal = load("everstep.quorum.heal")
heal.PIECE_BYTES = network.BULK_BYTES  # a state has four such pieces, so it may come from several groups
attempt.room_for = network.memory.room_for  # the step protocol itself is not loaded again
process_group.dist = SimpleNamespace(TCPStore=services.Store, PrefixStore=services.Prefix, Store=object)
