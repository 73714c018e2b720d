"""Damaged files of a run directory are refused, or what is read from them can be used. Commands that read one end with
an exit status and without a traceback. (tests/config/test_damage.py damages the config.)"""

import json
import math
import os
import random
import shutil
from dataclasses import asdict
from unittest.mock import Mock

import pytest

from damage import damaged
from everstep import cli
from everstep.chaos.view import View
from everstep.commands import status
from everstep.data.pack import pack
from everstep.launch.incarnation import Incarnation
from everstep.launch.prepare import Prepared, read_prepared
from everstep.launch.view import RunState
from everstep.report import metrics
from everstep.run.address import address_file, publish_address, published_address
from everstep.run.beats import BeatFile, beat_path, beats_of_groups, read_beat
from everstep.run.directory import End, groups_file, lock_run_dir, number_of_groups, over_file, prepared_file
from everstep.run.event_fields import NEEDED, event_in
from everstep.run.events import EventLog, read_events
from everstep.run.fence import Claim, claim_group, fence_file
from everstep.run.files import read_typed, write_json
from everstep.run.token import own_token
from everstep.wire import parse_address


def address(run):
    found = published_address(run)
    assert found == "" or parse_address(found.removeprefix("http://").removeprefix("https://").rstrip("/"))


def beat(run):
    found = read_beat(beat_path(run, 0, 0))
    assert found is None or (found.pid > 1 and math.isfinite(found.mono) and found.phase.isprintable())
    beats_of_groups(run)


def state(run):
    assert isinstance(read_typed(Claim, fence_file(run, 0)), Claim | None)
    assert number_of_groups(run) >= 0
    assert isinstance(read_prepared(run), Prepared | None)


def events(run):
    """Do what the readers of a run do with its events, except the page."""
    shown, view = RunState(), View(run)
    found = list(read_events(run))
    for event in found:
        shown.apply(event)
    metrics.prometheus_text(shown, 1)
    view.apply(found)


def write_all(run):
    """Write each kind of file of a run directory. Return the function that reads and checks a file, by file."""
    publish_address(run, "http://[::1]:29510")
    BeatFile(beat_path(run, 0, 0)).beat("compute", 5)
    claim_group(run, 0, Claim(1, 0), lambda: True)
    write_json(groups_file(run), {"groups": 2})
    write_json(prepared_file(run), asdict(Prepared(2, 1, seed=0, steps=1, identity="x", warnings=["w"])))
    (run / "config.toml").write_text('[job]\nmodule = "llama3"\n')
    write_events(run)
    return {
        address_file(run): address, beat_path(run, 0, 0): beat, fence_file(run, 0): state,
        groups_file(run): state, prepared_file(run): state,
    } | dict.fromkeys((run / "events").iterdir(), events)  # fmt: skip


def write_events(folder):
    """Write the events of a small run, and one event of every kind that has needed fields."""
    log = EventLog(folder, 0, 0, "worker")
    log.emit("run_started", groups=2, ranks_per_group=1, seed=1, steps=4)
    for step in range(1, 5):
        log.emit("attempt", step, attempt=1, quorum_id=1, committed=True, reason="", computed=[0, 1], recomputed=[])
        made = {"owners": [0, 0, 1, 1], "groups": [0, 1], "loss": 2.5, "tokens": 8.0, "grad_norm": 1.0}
        log.emit("commit", step, **made, history=f"{step:x}", parent=f"{step - 1:x}")
    for kind in sorted(NEEDED.keys() - {"run_started"}):
        log.emit(kind, **{"step": 4} | {name: value_of(name) for name in NEEDED[kind]})


def value_of(name):
    """Return a value that a field of this name may have; for a pid, one that no process has."""
    nobody = 1 << 30
    values = (nobody,) if name == "pid" else (4, [0], ["x"], [[0, 1]], True, "x", {"0": 1}, {"0": "1"}, [nobody])
    return next(v for v in values if event_in(json.dumps({"t": 1.0, "kind": "other", name: v}).encode()))


COMMANDS = (
    ("status",), ("watch",), ("report", "--json"), ("report", "--check"), ("report", "--against", "OTHER"), ("stop",),
    ("same", "OTHER"), ("snapshots",), ("chaos", "--every", "5"), ("scale", "--groups", "3"),
)  # fmt: skip
EVERY = 8
"""One in this many damages is read by a command too."""


@pytest.mark.parametrize("rounds", [1500, pytest.param(80_000, marks=pytest.mark.slow)])
def test_no_damage_ends_a_reader_or_is_believed_and_every_command_ends_with_a_status(
    tmp_path, monkeypatch, capsys, rounds
):
    def enough(pause_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", enough)  # a run without an end is watched for ever
    run_dir = tmp_path / "run"
    doors = write_all(run_dir)
    write_json(over_file(run_dir, 1), End("failed", "given up").__dict__)
    own_token(run_dir)
    lock_run_dir(run_dir)
    (tmp_path / "in.txt").write_text("some text " * 99)
    pack((tmp_path / "in.txt",), run_dir / "corpus.tokens")
    shutil.copytree(run_dir, tmp_path / "other")
    files = sorted(path for path in run_dir.rglob("*") if path.is_file())
    whole, chance, statuses = {path: path.read_bytes() for path in files}, random.Random(rounds), set()
    modes = {path: path.stat().st_mode for path in files}  # a token that others can read is refused
    for number in range(rounds):
        path = chance.choice(files if number % EVERY == 0 else [*doors])
        path.write_bytes(damaged(whole[path], chance))
        doors.get(path, state)(run_dir)
        if number % EVERY == 0:
            prepared_file(run_dir).unlink()  # with one, `scale` asks another process what the config says
            if path.suffix == ".tokens":
                words = ["pack", "--verify", "--out", str(path)]
            else:
                name, *more = COMMANDS[number // EVERY % len(COMMANDS)]
                words = [name, str(run_dir), *(one.replace("OTHER", str(tmp_path / "other")) for one in more)]
            with pytest.raises(SystemExit) as ended:
                cli.main(words)
            said = "".join(capsys.readouterr())
            assert ended.value.code in (0, 1, 2, cli.INTERRUPTED_EXIT), (words, path, said)
            assert "Traceback" not in said
            assert json.dumps(said).count("\\u001b[2J") == 0, "nothing of it is obeyed by a terminal"
            statuses.add(ended.value.code)
            for one, data in whole.items():
                one.write_bytes(data)
                one.chmod(modes[one])
        path.write_bytes(whole[path])
    assert statuses >= {0, 1, 2}
    assert (published_address(run_dir), read_beat(beat_path(run_dir, 0, 0)).phase) == ("http://[::1]:29510", "compute")
    assert (read_typed(Claim, fence_file(run_dir, 0)), read_prepared(run_dir).groups) == (Claim(1, 0), 2)


@pytest.mark.parametrize(("pid", "mono"), [(0, 1.0), (1, 1.0), (-1, 1.0), (99, math.nan), (99, math.inf)])
def test_a_beat_of_no_process_or_of_no_time_is_none(tmp_path, monkeypatch, pid, mono):
    beats = BeatFile(tmp_path / "beat")
    monkeypatch.setattr("everstep.run.beats.os.getpid", lambda: pid)
    monkeypatch.setattr("everstep.run.beats.time.monotonic", lambda: mono)
    beats.beat("compute")
    assert read_beat(tmp_path / "beat") is None


def test_who_beats_is_not_taken_for_hung_if_the_file_is_removed(tmp_path):
    settings = Mock(run_dir=tmp_path, group=0, fault_tolerance=Mock(startup_timeout_s=9.0, stall_timeout_s=9.0))
    one = Incarnation(settings, 0, Mock(), {0: Mock(pid=os.getpid(), rank=0)})
    beats = BeatFile(path := beat_path(tmp_path, 0, 0))
    beats.beat("compute")
    one.started_mono, now = -math.inf, read_beat(path).mono
    for _ in range(2):
        one.look_for_stall(Mock(), now, -math.inf)
        assert one.stalled is None
        shutil.rmtree(path.parent, ignore_errors=True)
    assert beats.beat("compute", 7)


STANDS_THERE = {
    "a link": lambda path, precious: path.symlink_to(precious),
    "a link to nothing": lambda path, precious: path.symlink_to(path.with_name("nothing")),
    "a pipe": lambda path, precious: os.mkfifo(path),
    "other types": lambda path, precious: path.write_text(
        '{"epoch": "x", "address": 3, "groups": "x", "status": [], "job": null}'
    ),
}


@pytest.mark.parametrize("what", STANDS_THERE)
def test_what_stands_in_the_place_of_a_state_file_is_not_believed_followed_or_waited_for(tmp_path, what):
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    names = ("lighthouse.json", "group-0.rank-0.beat", "group-0.fence.json", "group-0.fence.lock")
    names += ("groups.json", "prepared.json", "../events/scale.jsonl")
    for path in (run / "state" / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        STANDS_THERE[what](path, precious)
    publish_address(run, "http://h:1")
    BeatFile(beat_path(run, 0, 0)).beat("compute", 5)
    claim_group(run, 0, Claim(1, 0), lambda: True)
    EventLog(run, None, None, "scale").emit("scaled", count=1)
    assert (published_address(run), read_beat(beat_path(run, 0, 0)).step) == ("http://h:1", 5)
    assert (read_typed(Claim, fence_file(run, 0)), number_of_groups(run), read_prepared(run)) == (Claim(1, 0), 0, None)
    assert precious.read_text() == "precious"
    assert not list(tmp_path.rglob("nothing"))
