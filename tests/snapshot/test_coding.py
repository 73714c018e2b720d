"""If a keeper cannot code a snapshot, its notes blame the group that caused this, and no other."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import wire
from everstep.run.files import write_json
from everstep.run.token import run_token
from everstep.snapshot import parity, peers
from everstep.snapshot.buffer import BufferWriter, chunk_digests
from everstep.snapshot.coding import NOBODY, Coder, Waits
from everstep.snapshot.header import Header
from everstep.snapshot.keeper import Keeper
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Notes, Segment, run_id

GROUPS, RANKS, SIZE = range(4), range(2), 4 << 20
TIME_S = 1.2


class Host:
    """One group's host: its keeper serves the published parts of two ranks, and codes when the test says so."""

    def __init__(self, run_dir: Path, group: int) -> None:
        self._settings = Snapshot(segment_dir=str(run_dir / str(group)), memory_reserve_gb=0.0)
        Path(self._settings.segment_dir).mkdir()
        self._segment = Segment.of(self._settings, run_id(run_token(run_dir)), group)
        self._segment.create()
        for rank in RANKS:
            writer = BufferWriter(self._segment.files("data", rank)[0])
            writer.reserve(SIZE)
            writer.begin()
            header = Header(
                run=self._segment.run, kind="data", group=group, rank=rank, ranks=2, step=5, history=1, parity=1,
                shared_by=((0, 3),), parity_group=tuple(GROUPS), topology="t", state_bytes=4 * SIZE, payload_bytes=SIZE,
                part=(group * SIZE, group * SIZE + SIZE), last_section=SIZE, sequence=1,
            )  # fmt: skip
            writer.publish(header, chunk_digests(writer.payload(SIZE).data))
            writer.release()
        self.keeper = Keeper(run_dir, self._segment, "127.0.0.1", self._settings)
        self.neighbours = self.keeper._neighbours
        peers.write_record(run_dir, self.keeper.record(group))

    def blames(self, time_s: float = TIME_S) -> list[int]:
        """Code both ranks within `time_s` seconds. Returns the group that the keeper blames, by rank."""
        waits = Waits(time.monotonic() + time_s)
        for rank in RANKS:
            coder = Coder(self._segment, rank, self._settings, self.neighbours, threading.Event(), print)
            coder.code(coder.newer(), waits)
        return [notes.blamed_group for notes in self.notes]

    @property
    def notes(self) -> list[Notes]:
        return [self._segment.read_notes(rank) for rank in RANKS]


@pytest.fixture
def hosts(tmp_path) -> Iterator[list[Host]]:
    found = [Host(tmp_path, group) for group in GROUPS]
    yield found
    for host in found:
        host.keeper._server.close()


@pytest.mark.parametrize(("thing", "name"), [(Coder, "_writer"), (parity, "combine")])
def test_a_keeper_that_is_slow_at_its_own_work_blames_itself(hosts, monkeypatch, thing, name):
    plain = getattr(thing, name)
    with monkeypatch.context() as slow:
        slow.setattr(thing, name, lambda *args: (time.sleep(TIME_S), plain(*args))[1])
        assert hosts[2].blames() == [2, 2]
    assert hosts[2].blames(60.0) == [NOBODY, NOBODY], "with time enough it is coded"


def test_each_rank_of_a_batch_blames_the_group_that_took_the_time(hosts, monkeypatch):
    """A rank whose turn comes after the deadline blames it too."""
    plain = hosts[0].neighbours.open

    def opened(group, rank, identity, deadline):
        if group == 3:
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise wire.WireError("host 3 was silent")
        return plain(group, rank, identity, deadline)

    monkeypatch.setattr(hosts[0].neighbours, "open", opened)
    assert hosts[0].blames() == [3, 3]
    assert hosts[0].notes[1].reason == "group 3 took most of the coding time: host 3 was silent"


def test_a_host_that_a_group_left_and_that_is_off_does_not_hold_up_the_coding(hosts, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as off:  # it never answers
        place = peers.KeeperRecord(1, "off", f"127.0.0.1:{off.getsockname()[1]}", 2, "", 0.0)
        write_json(peers.records_dir(tmp_path) / "group-1@off.json", vars(place))
        for why in ("no keeper of group 1 is known", "127.0.0.1"):
            began = time.monotonic()
            with pytest.raises(wire.WireError, match=why):
                hosts[0].neighbours.open(1, 0, "of a trainer that has not published yet", began + 60)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("character", ["x", "é", "\N{GRINNING FACE}", "\0", "\ud800"])
def test_a_keeper_is_heard_whatever_it_gives_as_a_reason(tmp_path, character):
    it = Segment("run", 0, tmp_path)
    it.write_notes(0, Notes(time.monotonic(), reason=1000 * character))
    assert not it.read_notes(0).is_silent
