"""Small files of a run's state, damaged: nothing is believed, nobody ends."""

import contextlib
import hashlib
import os
import random

import pytest

from damage import damaged
from everstep.launch.prepare import take_answer
from everstep.run.address import address_file, publish_address, published_address, superseded
from everstep.run.beats import BeatFile, beat_path, beats_of_groups, read_beat
from everstep.run.data_start import began_after
from everstep.run.directory import GroupOver, over_file, wanted_groups
from everstep.run.events import EventLog
from everstep.run.fence import Claim, claim_group, fence_file, holder, holds
from everstep.run.files import read_typed
from everstep.wire import WireError, parse_address

DATA = f"data/{hashlib.sha256(b'a').hexdigest()[:16]}.json"
ADDRESS = "http://127.0.0.1:29510"


@pytest.mark.parametrize("rounds", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_addresses_beats_and_fences_end_nobody(tmp_path, rounds):
    folder, chance = tmp_path, random.Random(rounds)
    publish_address(folder, ADDRESS, 7)
    BeatFile(beat_path(folder, 0, 0)).beat("compute", 5)
    claim_group(folder, 0, Claim(1, 0), lambda: True)
    files = [address_file(folder), beat_path(folder, 0, 0), fence_file(folder, 0)]
    whole = {path: path.read_bytes() for path in files}
    for _ in range(rounds):
        path = chance.choice(files)
        path.write_bytes(damaged(whole[path], chance))
        address = published_address(folder)
        assert address == "" or parse_address(address.removeprefix("http://").removeprefix("https://").rstrip("/"))
        beat = read_beat(beat_path(folder, 0, 0))
        assert beat is None or (beat.pid > 1 and beat.mono == beat.mono and beat.phase.isprintable())
        beats_of_groups(folder)
        holder(folder, 0)
        holds(folder, 0, Claim(2, 0))
        path.write_bytes(whole[path])
    assert published_address(folder) == ADDRESS
    assert read_beat(beat_path(folder, 0, 0)).phase == "compute"
    assert holder(folder, 0) == Claim(1, 0)


def published(run):
    superseded(run, 9)
    return publish_address(run, ADDRESS, 7), published_address(run)


def beaten(run):
    BeatFile(beat_path(run, 0, 0)).beat("compute", 5)
    return read_beat(beat_path(run, 0, 0)).step


def claimed(run):
    claim_group(run, 0, Claim(1, 0), lambda: True)
    return holder(run, 0)


USES = {
    # a file of the run's state: what a run does with it, and what comes of it whatever stood there before
    "lighthouse.json": (published, (1, ADDRESS)),
    "lighthouse.lock": (published, (1, ADDRESS)),
    "group-0.rank-0.beat": (beaten, 5),
    "group-0.fence.json": (claimed, Claim(1, 0)),
    "group-0.fence.lock": (claimed, Claim(1, 0)),
    "group-0.over": (lambda run: read_typed(GroupOver, over_file(run, 0)), None),
    "groups.json": (lambda run: wanted_groups(run, 2), 2),
    "prepared.json": (take_answer, ""),
    DATA: (lambda run: began_after(run, "a", 7), 7),
    "../events/scale.jsonl": (lambda run: EventLog(run, None, None, "scale").emit("scaled", count=1)["count"], 1),
}
STANDS_THERE = {
    "a link": lambda path, precious: path.symlink_to(precious),
    "a link to nothing": lambda path, precious: path.symlink_to(path.with_name("nothing")),
    "a pipe": lambda path, precious: os.mkfifo(path),
    "text": lambda path, precious: path.write_text("text"),
    "a list": lambda path, precious: path.write_text("[1]"),
    "other types": lambda path, precious: path.write_text(
        '{"epoch": "x", "address": 3, "began_after": "x", "groups": "x", "status": [], "job": null}'
    ),
}


@pytest.mark.parametrize("what", STANDS_THERE)
@pytest.mark.parametrize("name", USES)
def test_what_stands_in_the_place_of_a_state_file_is_not_believed_followed_or_waited_for(tmp_path, name, what):
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    path = run / "state" / name
    path.parent.mkdir(parents=True)
    (run / "events").mkdir(exist_ok=True)
    STANDS_THERE[what](path, precious)
    use, expected = USES[name]
    assert use(run) == expected
    assert precious.read_text() == "precious"
    assert not (path.parent / "nothing").exists()


def test_strings_that_might_be_addresses_are_places_or_a_wire_error():
    chance = random.Random(3)
    for _ in range(10_000):
        text = damaged(chance.choice([b"127.0.0.1:80", b"[::1]:443", b"node-7:1"]), chance).decode("latin-1")
        with contextlib.suppress(WireError):
            host, port = parse_address(text)
            assert 0 <= port <= 65535
            assert host.isascii()
            assert host.isprintable()
