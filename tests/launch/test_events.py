"""What the event log promises: every process can append, and whatever was written whole can be read."""

import json
import multiprocessing
import os

import pytest

from everstep.run.events import EventLog, EventTail, read_events


def test_every_line_carries_times_place_step_and_kind(tmp_path):
    EventLog(tmp_path, 2, 1, "worker").emit("commit", step=7, loss=1.5, owners=[0, 2])
    (line,) = (tmp_path / "events/group-2.rank-1.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert event["t"] > 0
    assert event["mono"] > 0
    del event["t"], event["mono"]
    assert event == {
        "role": "worker", "group": 2, "rank": 1, "step": 7, "kind": "commit", "loss": 1.5, "owners": [0, 2],
    }  # fmt: skip


def test_each_role_has_its_file(tmp_path):
    for group, rank, role in [
        (0, 0, "worker"),
        (1, None, "agent"),
        (None, None, "supervisor"),
        (None, None, "chaos"),
    ]:
        EventLog(tmp_path, group, rank, role).emit("x")
    names = {path.name for path in (tmp_path / "events").iterdir()}
    assert names == {"group-0.rank-0.jsonl", "agent-1.jsonl", "supervisor.jsonl", "chaos.jsonl"}


def test_events_of_all_files_come_in_time_order(tmp_path):
    a, b = EventLog(tmp_path, 0, 0, "worker"), EventLog(tmp_path, None, None, "supervisor")
    for i in range(20):
        (a if i % 3 else b).emit("tick", i=i)
    assert [event["i"] for event in read_events(tmp_path)] == list(range(20))


def test_a_line_torn_by_a_crash_is_skipped_and_does_not_swallow_the_next_writer(tmp_path):
    log = EventLog(tmp_path, None, None, "chaos")
    log.emit("before")
    with log.path.open("ab") as file:
        file.write(b'{"t": 1.0, "kind": "torn", "fau')
    assert [event["kind"] for event in read_events(tmp_path)] == ["before"]
    EventLog(tmp_path, None, None, "chaos").emit("after")
    assert [event["kind"] for event in read_events(tmp_path)] == ["before", "after"]


def test_a_field_may_not_shadow_what_every_event_carries(tmp_path):
    with pytest.raises(ValueError, match="group"):
        EventLog(tmp_path, None, None, "chaos").emit("fault", group=1)


def test_the_tail_returns_each_event_once_and_waits_for_the_end_of_a_line(tmp_path):
    tail = EventTail(tmp_path)
    assert tail.new() == []
    log = EventLog(tmp_path, 0, None, "agent")
    log.emit("one")
    assert [event["kind"] for event in tail.new()] == ["one"]
    assert tail.new() == []
    whole = json.dumps({"t": 1.0, "kind": "two"}).encode() + b"\n"
    with log.path.open("ab", buffering=0) as file:
        file.write(whole[:9])
        assert tail.new() == []
        file.write(whole[9:])
    assert [event["kind"] for event in tail.new()] == ["two"]


def _append_many(run_dir, writer):
    log = EventLog(run_dir, 0, 0, "worker")
    for i in range(200):
        log.emit("many", writer=writer, i=i, padding="x" * 3000)


def test_writers_of_one_file_never_mix_their_lines(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(tmp_path, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    seen = [(event["writer"], event["i"]) for event in read_events(tmp_path)]
    assert sorted(seen) == [(n, i) for n in range(4) for i in range(200)]


def test_a_full_disk_costs_the_event_and_is_said_once(tmp_path, capsys):
    log = EventLog(tmp_path, None, None, "chaos")
    os.close(log._fd)
    log._fd = os.open("/dev/full", os.O_RDWR)
    log.emit("lost")
    log.emit("lost")
    assert capsys.readouterr().err.count("No space left") == 1
