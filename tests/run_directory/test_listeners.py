"""Which ports a process listens on is read from the kernel."""

import json
import os
import socket
import subprocess
import sys

from everstep.commands.doctor import Doctor, doctor
from everstep.run.events import EventLog
from everstep.run.listeners import listeners, processes
from everstep.run.token import run_token


def test_listeners_are_told_with_their_addresses_and_guards():
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("0.0.0.0", 0)) as far:
        found = {one.port: one for one in listeners([("keeper", os.getpid()), ("worker", 2**22 + 1)])}
        local, public = found[near.getsockname()[1]], found[far.getsockname()[1]]
    assert (local.role, local.local, local.guard) == ("keeper", True, "the run's token")
    assert (public.address, public.local) == ("0.0.0.0", False)


def test_the_processes_of_a_run_are_found_by_its_events(tmp_path):
    """Not those that only have the pid of one that ended, nor others' processes."""
    ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # everstep"])
    other = subprocess.Popen(["sleep", "600"])
    try:
        agent = EventLog(tmp_path, 0, None, "agent")
        agent.emit("workers_started", incarnation=0, pids=[ours.pid, other.pid])
        assert list(processes(tmp_path)) == [("worker", ours.pid)]
        path = tmp_path / "events" / "agent-0.jsonl"
        event = json.loads(path.read_text())
        path.write_text(json.dumps(event | {"t": event["t"] - 3600}) + "\n")
        assert list(processes(tmp_path)) == [], "it began after the one that is meant"
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_the_doctor_shows_every_listener_and_what_guards_it(tmp_path, capsys):
    run_token(tmp_path)
    code = "import socket, time; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True)\n"
    worker = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(600)  # everstep"], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(worker.stdout.readline())
        EventLog(tmp_path, 0, None, "agent").emit("workers_started", incarnation=0, pids=[worker.pid])
        assert doctor(Doctor(run_dir=tmp_path, listeners=True), []) == 0
        said = capsys.readouterr().out
        assert f"0.0.0.0:{port}, worker (pid {worker.pid}); guarded by the run's token (states, watch), or by" in said
        assert "warning" in said
        assert "a firewall" in said
    finally:
        worker.kill()
        worker.wait()
    assert doctor(Doctor(run_dir=tmp_path, listeners=True), []) == 0
    assert "no process of this run" in capsys.readouterr().out
