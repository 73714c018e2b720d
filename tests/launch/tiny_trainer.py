"""A worker that does what the launcher can see of a trainer: beats, events, a clean end on SIGTERM.

It has no model and no torch, so that processes are what these tests are about. Flags of its own:
`--tiny.step_s S` (length of a step), `--tiny.fail` (raise before the first step), `--tiny.fail_in S` (raise in step
S, its group's name in the second line), `--tiny.skip` (but not once that slot is poison), `--tiny.first_s S` (length of
the first step), `--tiny.deaf S` (handle SIGTERM only after so many seconds), `--tiny.exit N` (leave with status N at
once), `--tiny.vanish R` (rank R is gone at once, with status 0), `--tiny.early R` (rank R is done after the first
step), `--tiny.litter` (leaves a process of its own behind). SIGUSR1 is to it what the death of a peer is to a trainer:
an exception.
"""

import json
import os
import signal
import subprocess
import time
import tomllib
from pathlib import Path

from everstep.launch.prepare import leave_answer
from everstep.run.beats import Heartbeat
from everstep.run.events import EventLog
from everstep.run.poison import deaths_at

if (Path(os.environ.get("TMPDIR", "/tmp")) / "upgraded").exists():
    raise ImportError("it was upgraded")


def flag(argv, name, default=None):
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1] if name in argv else default


def main(argv):
    if (config := Path(flag(argv, "--config"))).exists():
        argv = [*tomllib.loads(config.read_text())["flags"], *argv]
    run_dir, rank = Path(flag(argv, "--dump_folder")), int(os.environ["RANK"])
    group, groups = int(flag(argv, "--fault_tolerance.group_id")), int(flag(argv, "--fault_tolerance.groups"))
    if flag(argv, "--tiny.exit") is not None:
        raise SystemExit(int(flag(argv, "--tiny.exit")))
    if rank == int(flag(argv, "--tiny.vanish", "-1")):
        os._exit(0)
    if "--tiny.fail" in argv:
        raise RuntimeError("no such luck")
    asked_to_leave = []
    if (deaf_s := float(flag(argv, "--tiny.deaf", "0"))) > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: asked_to_leave.append(True))
    signal.signal(signal.SIGUSR1, fail)
    heart, events = Heartbeat(run_dir, group, rank), EventLog(run_dir, group, rank, "worker")
    if "--tiny.litter" in argv:
        events.emit("warning", text=str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    steps, step_s = int(flag(argv, "--training.steps")), float(flag(argv, "--tiny.step_s", "0.02"))
    begun = time.monotonic()
    print(f"rank {rank} of group {group} trains", flush=True)
    events.emit("training_started", step=1, source="fresh", slots=groups)
    for step in range(1, steps + 1):
        heart.beat("compute", step, slot=step % 4)
        poison = step == int(flag(argv, "--tiny.fail_in", "0"))
        if poison and "--tiny.skip" in argv and deaths_at(run_dir, (step, step % 4)).poisoned(groups):
            events.emit("slot_skipped", step, slot=step % 4)
        elif poison:
            raise FileNotFoundError(f"there is no dataset for port {os.getpid()}\nin group {group}")
        time.sleep(float(flag(argv, "--tiny.first_s", step_s)) if step == 1 else step_s)
        if deaf_s and time.monotonic() > begun + deaf_s:
            signal.signal(signal.SIGTERM, lambda *_: asked_to_leave.append(True))
        done = {"loss": 1 / step, "tokens": 100, "grad_norm": 1.0, "took_s": step_s}
        names = {"history": f"{step:x}", "parent": f"{step - 1:x}"}
        events.emit("commit", step=step, groups=list(range(groups)), **names, **done)
        if rank == int(flag(argv, "--tiny.early", "-1")):
            raise SystemExit(0)
        if asked_to_leave:
            events.emit("left", step)
            return
    events.emit("training_done", steps)


def fail(*_):
    raise RuntimeError("a peer is gone")


def prepare(config, run_dir, flags, *_):
    """Settle the config without torchtitan: all of it is flags. `--tiny.torn`: be killed while answering."""
    if "--tiny.torn" in flags:
        leave_answer(Path(run_dir), {})
        (Path(run_dir) / "state" / "prepared.json").write_text('{"steps":')
        os.kill(os.getpid(), signal.SIGKILL)
    (Path(run_dir) / "config.toml").write_text(f"flags = {json.dumps(flags)}")
    leave_answer(Path(run_dir), {"steps": int(flag(flags, "--training.steps", "1000000"))})
