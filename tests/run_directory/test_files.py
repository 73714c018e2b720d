"""Small files of a run's state, damaged: nothing is believed, nobody ends."""

import random
import time

import pytest

from damage import damaged
from everstep.run.address import address_file, publish_address, published_address
from everstep.run.beats import BeatFile, beat_path, beats_of_groups, read_beat
from everstep.run.fence import Claim, claim_group, fence_file, holder, holds
from everstep.wire import WireError, parse_address

ADDRESS = "http://127.0.0.1:29510"


def fuzz(folder, rounds, seed):
    chance = random.Random(seed)
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


def test_damaged_addresses_beats_and_fences_end_nobody(tmp_path):
    fuzz(tmp_path, 2000, 1)


@pytest.mark.slow
def test_many_damaged_addresses_beats_and_fences_end_nobody(tmp_path):
    fuzz(tmp_path, 50_000, 2)


def test_strings_that_might_be_addresses_are_places_or_a_wire_error():
    chance = random.Random(3)
    begun = time.monotonic()
    for _ in range(20_000):
        text = damaged(chance.choice([b"127.0.0.1:80", b"[::1]:443", b"node-7:1"]), chance).decode("latin-1")
        try:
            host, port = parse_address(text)
        except WireError:
            continue
        assert 0 <= port <= 65535
        assert host.isascii()
        assert host.isprintable()
    assert time.monotonic() - begun < 20
