"""Transfers of states to joiners: either what arrives is what was sent, or there is a clear error."""

import contextlib
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from everstep.quorum import heal
from everstep.quorum.heal import Fetch, HealState, StateServer, Wanted
from everstep.wire import parse_address
from everstep.wire.channel import Channel
from watched import until

TOKEN = bytes(range(32))
SOON = timedelta(seconds=60)


class HealError(Exception): ...


def fetch(like, *addresses, step=3, timeout=SOON):
    found = Fetch(addresses, Wanted(step, 0, ""), like.tensors, TOKEN, timeout)
    while found.state is None and not found.error:
        time.sleep(0.001)
    if found.error:
        raise HealError(found.error)
    return found.state


def a_state(seed: int = 0, big: int = 1000) -> HealState:
    generator = torch.Generator().manual_seed(seed)
    return HealState(
        tensors={
            "layers.0.weight": torch.randn(37, 53, generator=generator),
            "layers.0.bias": torch.randn(53, generator=generator).to(torch.bfloat16),
            "big": torch.randn(big, 256, generator=generator),
            "step": torch.tensor(float(seed)),
            "mask": torch.rand(11, generator=generator) > 0.5,
            "counts": torch.randint(0, 9, (3, 5), generator=generator),
            "nothing": torch.empty(0, 4),
        },
        meta={"lr": 3e-4, "names": ["a", "b"], "seed": seed},
        blobs={"rng": os.urandom(5056), "empty": b""},
    )


def assert_same(got: HealState, sent: HealState) -> None:
    assert list(got.tensors) == list(sent.tensors)
    for name, tensor in sent.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor), name
    assert (got.meta, got.blobs) == (sent.meta, sent.blobs)


@pytest.fixture
def server():
    server = StateServer("127.0.0.1", TOKEN, SOON)
    yield server
    server.shutdown()


def test_concurrent_joiners_all_receive_it(server):
    state = a_state(big=20_000)
    server.serve(3, 0, state)
    with ThreadPoolExecutor(5) as pool:
        for joiner in [pool.submit(fetch, state, server.address) for _ in range(5)]:
            assert_same(joiner.result(), state)


@pytest.mark.parametrize(("owner", "name", "waits"), [
    (Channel, "receive_range", False), (heal._Copy, "_copy", True)], ids=["joiner", "copy"])  # fmt: skip
def test_the_optimizer_waits_for_a_copy_and_for_no_joiner_and_changes_nothing_that_it_reads(
    server, monkeypatch, owner, name, waits
):
    """The optimizer changes every tensor while the transfer runs, or as soon as the copy is complete."""
    state, there, go_on, closed = a_state(big=60_000), threading.Event(), threading.Event(), threading.Event()
    state.tensors["transposed"] = torch.randn(5, 7).T
    before = HealState({name: tensor.clone() for name, tensor in state.tensors.items()}, state.meta, state.blobs)
    carry_out = getattr(owner, name)

    def hold(*what, **more):
        there.set()
        go_on.wait(60)
        return carry_out(*what, **more)

    def commit():
        server.close()
        for tensor in state.tensors.values():
            tensor.zero_()
        closed.set()

    monkeypatch.setattr(owner, name, hold)
    server.serve(3, 0, state)
    with ThreadPoolExecutor(2) as pool:
        joiner = pool.submit(fetch, before, server.address)
        assert there.wait(60)
        pool.submit(commit)
        assert closed.wait(0.2 if waits else 60) != waits
        go_on.set()
        assert_same(joiner.result(), before)


@pytest.mark.parametrize(("rooms", "reason"), [
    ([False], "no memory for [0-9]* bytes"), ([True, False], "no memory for a copy")])  # fmt: skip
def test_a_host_without_memory_for_a_copy_takes_none_and_serves_nobody(server, monkeypatch, rooms, reason):
    left = iter(rooms)
    monkeypatch.setattr(heal, "room_for", lambda nbytes: contextlib.nullcontext(next(left)))
    server.serve(2, 0, a_state())
    with pytest.raises(HealError, match=reason):
        fetch(a_state(), server.address, step=2)


def test_a_door_that_shuts_waits_for_no_joiner_that_waits_for_a_step():
    door, state = StateServer("127.0.0.1", TOKEN, SOON), a_state()
    begin = time.monotonic()
    joiner = Fetch([door.address], Wanted(3, 0, ""), state.tensors, TOKEN, SOON)
    until(lambda: any(thread.name == "wire-peer" for thread in threading.enumerate()), "its request to come")
    door.shutdown()
    until(lambda: joiner.error, "the joiner to hear of it")
    assert time.monotonic() - begin < 0.5 * SOON.total_seconds()


def test_a_joiner_is_told_what_ended_a_copy_in_the_middle(server, monkeypatch):
    copy, ask, asked = heal._Copy._copy, Channel.ask_range, threading.Event()

    def lose(self, source, target):
        if len(source) > 100_000:
            asked.wait(60)
            raise RuntimeError("the device is lost")
        copy(self, source, target)

    monkeypatch.setattr(heal._Copy, "_copy", lose)
    monkeypatch.setattr(Channel, "ask_range", lambda *what: (ask(*what), asked.set()))
    server.serve(2, 0, a_state())
    with pytest.raises(HealError, match="could not be copied: the device is lost"):
        fetch(a_state(), server.address, step=2)


class Relay:
    """A proxy between a joiner and a source. After `after` bytes of what the source sends, it closes the connection
    ("dies"), forwards nothing more ("silent"), or flips a bit ("altered")."""

    def __init__(self, address: str, fate: str = "", after: int = 0) -> None:
        self._there, self._fate, self._after = parse_address(address), fate, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.given = 0
        """Bytes that have reached the joiner."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            joiner, source = self._listener.accept()[0], socket.create_connection(self._there)
            with joiner, source:
                threading.Thread(target=self._ask, args=(joiner, source), daemon=True).start()
                self._answer(joiner, source)

    def _answer(self, joiner: socket.socket, source: socket.socket) -> None:
        while data := bytearray(source.recv(1 << 16)):
            at = self._after - self.given
            if self._fate and 0 <= at < len(data):
                if self._fate == "silent":
                    self._over.wait(60)
                if self._fate != "altered":
                    return
                data[at] ^= 1
            joiner.sendall(data)
            self.given += len(data)

    def _ask(self, joiner: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := joiner.recv(1 << 16):
                source.sendall(data)
        self._over.set()
        for end in (joiner, source):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # no joiner connected
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)


FATES = ("dies", "silent", "altered")
"""What a relay does to a transfer, at any byte."""
STRANGE = ("history", "rank", "tensors", "nobody", "closed")
"""Sources without the state: of another history, rank or tensors, deaf, or closed."""


def a_source(state: HealState, fate: str, number: int = 0) -> StateServer:
    """Open a door to `state`. Its meta and blobs, which may differ between groups, contain its number."""
    state = HealState(state.tensors, state.meta | {"seed": number}, state.blobs | {"rng": bytes([number]) * 5056})
    door = StateServer("127.0.0.1", TOKEN, SOON, whose="another's" if fate == "rank" else "")
    if fate == "tensors":
        state = HealState(state.tensors | {"big": torch.zeros(256, 1000)}, state.meta, state.blobs)
    door.serve(3, int(fate == "history"), state)
    if fate == "closed":
        door.close()
    if fate == "nobody":
        door.shutdown()
    return door


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_whatever_sources_suffer_a_state_is_right_or_there_is_an_error_in_time(monkeypatch, rounds):
    """And there is no error as long as one of the sources is sound."""
    monkeypatch.setattr(heal, "PIECE_BYTES", 1 << 16)
    chance, state = random.Random(rounds), a_state()
    for _ in range(rounds):
        fates = [chance.choice(["", *FATES, *STRANGE]) for _ in range(chance.randint(1, 4))]
        doors = [a_source(state, fate, number) for number, fate in enumerate(fates)]
        after = [chance.choice([chance.randrange(3000), chance.randrange(1_100_000)]) for _ in fates]
        places = zip(doors, fates, after, strict=True)
        relays = [Relay(door.address, fate if fate in FATES else "", at) for door, fate, at in places]
        sound, got, begun = "" in fates, None, time.monotonic()
        timeout = SOON if sound else timedelta(seconds=0.3)
        with contextlib.suppress(HealError):
            got = fetch(state, *(relay.address for relay in relays), timeout=timeout)
        assert got is not None or not sound, (fates, after)
        if got is not None:
            told = got.meta["seed"]
            assert got.blobs["rng"] == bytes([told]) * 5056, "meta and blobs are from the same source"
            assert_same(got, HealState(state.tensors, state.meta | {"seed": told}, state.blobs | got.blobs))
        assert time.monotonic() - begun < 15
        for relay, door in zip(relays, doors, strict=True):
            relay.close()
            door.shutdown()
