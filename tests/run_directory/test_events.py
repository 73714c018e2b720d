"""What the event log promises: every process can append, whatever was written whole can be read, and what was damaged
or planted is skipped and counted."""

import json
import multiprocessing
import os
import random

import pytest

from damage import damaged
from everstep.chaos.view import View
from everstep.launch.view import RunState
from everstep.report import metrics
from everstep.report.score import score
from everstep.run.events import EventLog, EventTail, read_events


def a_run(folder, steps=12):
    """A small run's events, of every kind that its readers look at closely."""
    supervisor, agent, worker = (
        EventLog(folder, None, None, "supervisor"),
        EventLog(folder, 0, None, "agent"),
        EventLog(folder, 0, 0, "worker"),
    )
    supervisor.emit("run_started", groups=2, ranks_per_group=1, seed=1, steps=steps)
    supervisor.emit("lighthouse_started", address="http://127.0.0.1:1", pid=77)
    agent.emit("agent_up", pid=78)
    agent.emit("workers_started", incarnation=0, pids=[79])
    worker.emit("worker_up", incarnation="0", pid=79, cpu_s=1.0)
    worker.emit("worker_ready", incarnation="0", pid=79, startup_s=1.0)
    worker.emit("training_started", 1, source="start", slots=4, global_batch_size=8, ranks=1)
    for step in range(1, steps + 1):
        worker.emit("attempt", step, attempt=1, quorum_id=1, committed=True, reason="", computed=[0, 1], recomputed=[])
        fields = {"attempt": 1, "owners": [0, 0, 1, 1], "groups": [0, 1], "loss": 2.5, "tokens": 8.0, "grad_norm": 1.0}
        fields |= {"history": f"{step:x}", "parent": f"{step - 1:x}"}
        fields |= {"inner_steps": 5, "payload_bytes": 8, "gradient_bytes": 80, "kept_bytes": 9}
        worker.emit("commit", step, **fields, lr=0.1, took_s=0.1, compute_s=0.1, reduce_s=0.0, quorum_id=1)
        worker.emit("heal", step, source_group=1, history=f"{step:x}", bytes=10, took_s=0.1)
        worker.emit("audit", step, checksum="0", agreed=True, differing=[])
        worker.emit("finding", step, action="corrected", outcome="corrected")
        worker.emit("checkpoint_saved", step, took_s=0.1)
    agent.emit("workers_stalled", incarnation=0, phase="compute", idle_s=3.0, stalled_rank=0)
    agent.emit("workers_died", incarnation=0, reason="killed", exitcodes={"0": -9})
    agent.emit("agent_ended", status="done", reason="finished")
    chaos = EventLog(folder, None, None, "chaos")
    chaos.emit("fault", fault="kill-group", target_group=[0, 1], pids=[79], until=1.0)
    supervisor.emit("run_ended", status="done", reason="finished")


def read_by_all(folder, scored=True):
    """What the readers of a run do with its events, but for the pages."""
    state, view = RunState(), View(folder)
    events = list(read_events(folder))
    for event in events:
        state.apply(event)
    metrics.text(state, 2, 1)
    view.apply(events)
    if scored:
        score(folder)


VALUES = [
    None, True, False, -1, 0, 1, 1.5, 1e300, -1e300, 1 << 62, 1 << 80, "", "x", "\x1b[2J", [], [None], [1e300], {},
]  # fmt: skip


def planted(line, chance):
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return b""
    if not isinstance(event, dict) or "kind" not in event:
        return b""
    key = chance.choice([*event])
    match chance.randrange(3):
        case 0:
            del event[key]
        case 1:
            event[key] = chance.choice(VALUES)
        case 2:
            event["kind"] = chance.choice(["commit", "heal", "fault", "run_started", "workers_started", "agent_up"])
    return json.dumps(event).encode()


@pytest.mark.parametrize("rounds", [800, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_events_stop_no_reader(tmp_path, rounds):
    a_run(tmp_path, steps=4)
    chance = random.Random(rounds)
    files = {path: path.read_bytes().splitlines() for path in (tmp_path / "events").iterdir()}
    for number in range(rounds):
        path = chance.choice(sorted(files))
        lines = list(files[path])
        for _ in range(chance.choice([1, 2, 5])):
            at = chance.randrange(len(lines))
            lines[at] = chance.choice([planted, damaged])(lines[at] or b"x", chance)
        path.write_bytes(b"\n".join(lines) + b"\n")
        read_by_all(tmp_path, scored=number % 20 == 0)
        path.write_bytes(b"\n".join(files[path]) + b"\n")


def test_damaged_lines_are_counted_and_the_others_read(tmp_path):
    a_run(tmp_path)
    whole = list(read_events(tmp_path))
    path = tmp_path / "events" / "group-0.rank-0.jsonl"
    planted = b'{"t":1.0,"kind":"commit","step":5,"groups":[0]}\nnot json\n'
    planted += b'{"t":1,"kind":"workers_started","group":0,"pids":[-1]}\n'
    path.write_bytes(planted + path.read_bytes())
    seen = []
    assert list(read_events(tmp_path, on_damage=seen.append)) == whole
    assert seen == [path] * 3
    tail = EventTail(tmp_path)
    assert tail.new() == whole
    assert tail.damaged == 3


def test_a_pid_that_would_be_everybody_is_no_event(tmp_path):
    """kill(-1) reaches every process of the user, kill(0) the caller's own group."""
    log = EventLog(tmp_path, 0, None, "agent")
    for pid in (-1, 0, True, "7", 1 << 40):
        log.emit("workers_started", pids=[pid])
        log.emit("agent_up", pid=pid)
    assert list(read_events(tmp_path)) == []


def test_escape_sequences_do_not_reach_a_reader(tmp_path):
    log = EventLog(tmp_path, 0, None, "agent")
    log.emit("workers_died", reason="\x1b[2J\x9b1mgone\r\nrun done\u202e", exitcodes={"\x1b": 1})
    (event,) = read_events(tmp_path)
    assert event["reason"] == "\\x1b[2J\\x9b1mgone\\r\\nrun done\\u202e", "shown, not obeyed"
    assert event["exitcodes"] == {"\\x1b": 1}


def test_pipes_and_links_among_the_events_are_not_waited_for_nor_followed(tmp_path):
    a_run(tmp_path)
    whole = list(read_events(tmp_path))
    secret = tmp_path / "secret"
    secret.write_text('{"t":1.0,"kind":"x","secret":1}\n')
    os.mkfifo(tmp_path / "events" / "pipe.jsonl")
    (tmp_path / "events" / "link.jsonl").symlink_to(secret)
    assert list(read_events(tmp_path)) == whole
    assert EventTail(tmp_path).new() == whole
    (tmp_path / "events" / "chaos.jsonl").unlink()
    (tmp_path / "events" / "chaos.jsonl").symlink_to(secret)
    EventLog(tmp_path, None, None, "chaos").emit("fault", fault="kill-group")
    assert secret.read_text() == '{"t":1.0,"kind":"x","secret":1}\n'


def test_a_line_without_end_takes_no_memory(tmp_path, monkeypatch):
    from everstep.run import events

    monkeypatch.setattr(events, "LONGEST_LINE", 1000)
    monkeypatch.setattr(events, "LONGEST_READ", 1000)
    a_run(tmp_path)
    with (tmp_path / "events" / "long.jsonl").open("wb") as file:
        file.write(b"x" * 100_000 + b'\n{"t":1.0,"kind":"after"}\n')
    assert sum(event["kind"] == "after" for event in read_events(tmp_path)) == 1
    tail, found = EventTail(tmp_path), []
    for _ in range(200):
        found += tail.new()
    assert sum(event["kind"] == "after" for event in found) == 1


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
