"""What the event log promises: all processes can append, all whole lines be read; damaged and planted ones skipped."""

import itertools
import json
import multiprocessing
import os
import resource
import signal
import time
import tracemalloc

from everstep.launch.view import RunState
from everstep.report import metrics
from everstep.run import events
from everstep.run.event_fields import OF_EVERY_STEP
from everstep.run.events import EventLog, EventTail, last_event, read_events
from run_directory.test_damage import write_events


def test_damaged_lines_are_left_out_and_the_others_read(tmp_path):
    write_events(tmp_path)
    whole = list(read_events(tmp_path))
    path = tmp_path / "events" / "group-0.rank-0.jsonl"
    planted = b'{"t":1.0,"kind":"commit","step":5,"groups":[0]}\nnot json\n'
    for pid in ("-1", "0", "true", '"7"', str(1 << 40)):  # -1: all of the user, 0: our group
        planted += f'{{"t":1,"kind":"workers_started","group":0,"pids":[{pid}]}}\n'.encode()
        planted += f'{{"t":1,"kind":"agent_up","group":0,"pid":{pid}}}\n'.encode()
    path.write_bytes(planted + path.read_bytes())
    assert list(read_events(tmp_path)) == whole
    assert EventTail(tmp_path).new() == whole


def test_what_somebody_else_wrote_of_a_trouble_or_a_check_ends_no_reader(tmp_path):
    log, shown = EventLog(tmp_path, 0, 0, "worker"), RunState()
    for kind, fields in (
        ("straggler", {"pace": "x"}),
        ("snapshot_protected", {"members": [0], "survives": 0, "exposed": [], "survived": "x"}),
        ("commit", {"groups": [0], "loss": 1.0, "tokens": 1.0, "history": "1", "parent": "0", "apart_s": [1]}),
        ("attention_schedule", {"coverage": "x of y"}),
    ):
        log.emit(kind, 1, **fields)
    for event in read_events(tmp_path):
        shown.apply(event)
    assert b"everstep_attention_parts_checked 0.0" in metrics.prometheus_text(shown, 1)


def test_a_line_without_end_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "LONGEST_LINE", 1000)
    monkeypatch.setattr(events, "READ_AT_ONCE", 1000)
    write_events(tmp_path)
    with (tmp_path / "events" / "long.jsonl").open("wb") as file:
        file.write(b"x" * 100_000 + b'\n{"t":1.0,"kind":"after"}\n')
    assert sum(event["kind"] == "after" for event in read_events(tmp_path)) == 1
    assert sum(event["kind"] == "after" for event in EventTail(tmp_path).new()) == 1


def test_the_newest_event_of_a_kind_is_found_in_little_memory_however_far_back(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "READ_AT_ONCE", 1000)
    log = EventLog(tmp_path, 0, 0, "worker")
    for step in range(400):
        log.emit("first" if step < 2 else "other", step, text="x" * step)
    tracemalloc.start()
    found = last_event(log.path, {"first"}), last_event(log.path, {"absent"})
    assert tracemalloc.get_traced_memory()[1] < log.path.stat().st_size / 4
    tracemalloc.stop()
    assert (found[0]["step"], found[1]) == (1, None)


def test_a_line_torn_by_a_crash_is_skipped_and_does_not_swallow_the_next_writer(tmp_path):
    log = EventLog(tmp_path, None, None, "chaos")
    log.emit("before")
    with log.path.open("ab") as file:
        file.write(b'{"t": 1.0, "kind": "torn", "fau')
    assert [event["kind"] for event in read_events(tmp_path)] == ["before"]
    EventLog(tmp_path, None, None, "chaos").emit("after")
    assert [event["kind"] for event in read_events(tmp_path)] == ["before", "after"]


def test_the_tail_returns_each_event_once_waits_for_the_end_of_a_line_and_follows_an_emptied_log(tmp_path):
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
    os.truncate(log.path, 0)
    assert tail.new() == []
    for kind in ("is emptied now", "longer than before it was emptied, as nobody looked in between"):
        log.emit(kind)
    assert len(tail.new()) == 2


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


def test_a_run_may_have_more_logs_than_a_process_descriptors(tmp_path):
    for group in range(100):
        log = EventLog(tmp_path, group, 0, "worker")
        log.emit("one")
        log.close()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    try:
        found = [event["group"] for event in read_events(tmp_path)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert sorted(found) == [*range(100)]


def test_what_a_full_disk_refuses_is_written_once_there_is_room_and_is_said_once(tmp_path, capsys):
    log, ignored = EventLog(tmp_path, None, None, "chaos"), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log.emit("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 50, resource.RLIM_INFINITY))
    try:
        log.emit("torn")
        for _ in range(2):
            log.emit("refused")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, ignored)
    assert [event["kind"] for event in log.unwritten] == ["torn", "refused", "refused"]
    log.emit("after")
    assert [event["kind"] for event in read_events(tmp_path)] == ["before", "torn", "refused", "refused", "after"]
    assert not log.unwritten
    said = capsys.readouterr().err
    assert (said.count("No space left"), said.count("\n")) == (1, 1)


def test_event_times_include_the_time_that_a_host_slept_but_no_step_of_its_wall_clock(tmp_path, monkeypatch):
    log, clock = EventLog(tmp_path, None, None, "chaos"), time.clock_gettime
    before = log.emit("before")["t"]
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + 3600 * (which == time.CLOCK_BOOTTIME))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 3600 < EventLog(tmp_path, None, None, "chaos").emit("after")["t"] - before < 3660


def test_the_state_of_a_run_is_found_without_reading_every_step(tmp_path, monkeypatch):
    """Rare events count wherever they are in the log. Of kinds of every step the newest counts, in its order."""
    monkeypatch.setattr(events, "NEAR", 15_000)
    steps, commit = 500, {"groups": [0, 1], "loss": 1.0, "tokens": 1.0}
    logs = [EventLog(tmp_path, group, 0, "worker") for group in range(2)]
    for log in logs:
        log.emit("training_started", 0, source="fresh")
    for step, log in itertools.product(range(1, steps + 1), logs):
        log.emit("attempt", step, attempt=1, committed=True, recomputed=0)
        log.emit("slot_bits", step, bits={"0": "0123456789abcdef"})
        log.emit("commit", step, **commit, history=f"{step:x}", parent=f"{step - 1:x}")
        if step == 100:
            log.emit("snapshot_protected", step, members=[0, 1], survives=1, exposed=[])
            log.emit("snapshot_unprotected", step + 5, reason="a disk")
            log.emit("slot_refused", step, slot=3, reason="why")
    whole, quick, tail = RunState(), RunState(), EventTail(tmp_path)
    for event in read_events(tmp_path):
        whole.apply(event)
    found = list(tail.past(lately=OF_EVERY_STEP))
    assert len(found) < 200
    for event in found:
        quick.apply(event)
    for state in (whole, quick):
        assert state.newest.step == steps
        assert len(state.recent_commits()) > 5
        assert state.counts["slot_refused"] == 2
    assert quick.progress() == whole.progress()
    assert (quick.protection.line(), quick.troubles.sentences) == (whole.protection.line(), whole.troubles.sentences)
    assert tail.new() == []
    log.emit("warning", text="later")
    assert [event["text"] for event in tail.new()] == ["later"]
