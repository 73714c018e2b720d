"""A worker that behaves like a trainer as far as the launcher can see: beats, events, a clean end on SIGTERM.

It has no model and needs no torch, so that these tests are about processes only. Its flags:

    --tiny.first_s S                 seconds of the first step
    --tiny.fail_group K              raise before the first step in group K
    --tiny.fail_in S                 raise in step S, with the group in line 2 of the message
    --tiny.skip                      with fail_in: skip the slot instead once it is poison
    --tiny.exit N                    exit with status N at once
    --tiny.exhaust                   open descriptors until there are no more
    --tiny.vanish R                  rank R exits at once, with status 0
    --tiny.litter                    start child processes and report their pids
    --tiny.linger                    never end after the last step, the first time

SIGUSR1 raises an exception, as the death of a peer does in a trainer.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.launch.prepare import Prepared
from everstep.run.beats import DONE, BeatFile, beat_path
from everstep.run.directory import finished_file, prepared_file
from everstep.run.events import EventLog
from everstep.run.files import write_json
from everstep.run.poison import poisoned

STEP_S = 0.02


def flag(argv, name, default=None):
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1] if name in argv else default


def main():
    argv = sys.argv[1:]
    if (config := Path(flag(argv, "--config"))).exists():
        argv = [*tomllib.loads(config.read_text())["flags"], *argv]
    run_dir, rank = Path(flag(argv, "--dump_folder")), int(os.environ["RANK"])
    group, groups = int(flag(argv, "--fault_tolerance.group_id")), int(flag(argv, "--fault_tolerance.groups"))
    if flag(argv, "--tiny.exit") is not None:
        raise SystemExit(int(flag(argv, "--tiny.exit")))
    if (run_dir / "data-is-away").exists():
        raise SystemExit(2)
    while "--tiny.exhaust" in argv:
        os.dup(0)
    if rank == int(flag(argv, "--tiny.vanish", "-1")):
        os._exit(0)
    if int(flag(argv, "--tiny.fail_group", "-1")) == group:
        raise RuntimeError("no such luck")
    asked_to_leave = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_leave.append(True))
    signal.signal(signal.SIGUSR1, fail)
    heart, events = BeatFile(beat_path(run_dir, group, rank)), EventLog(run_dir, group, rank, "worker")
    if "--tiny.litter" in argv:
        plain, elsewhere = (subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (False, True))
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        forked.start()
        events.emit("warning", text=f"{plain.pid} {elsewhere.pid} {forked.pid}")
    steps = int(flag(argv, "--training.steps", "1000000"))
    print(f"rank {rank} of group {group} trains with {os.environ['OMP_NUM_THREADS']} threads", flush=True)
    events.emit("training_started", step=1, source="fresh", slots=groups)
    for step in range(1, steps + 1):
        heart.beat("compute", step, slot=step % 4)
        poison = step == int(flag(argv, "--tiny.fail_in", "0"))
        if poison and "--tiny.skip" in argv and poisoned(run_dir, (step, step % 4)):
            events.emit("slot_skipped", step, slot=step % 4)
        elif poison:
            raise FileNotFoundError(f"there is no dataset for port {os.getpid()}\nin group {group}")
        time.sleep(float(flag(argv, "--tiny.first_s", STEP_S)) if step == 1 else STEP_S)
        done = {"loss": 1 / step, "tokens": 100, "grad_norm": 1.0, "took_s": STEP_S}
        names = {"history": f"{step:x}", "parent": f"{step - 1:x}"}
        events.emit("commit", step=step, groups=list(range(groups)), **names, **done)
        if asked_to_leave:
            events.emit("left", step)
            write_json(finished_file(run_dir), {"step": steps})  # as if a group saved the last step of all
            return
    events.emit("training_done", steps)
    if "--tiny.linger" in argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        heart.beat(DONE)
        time.sleep(1000)


def fail(*_):
    raise RuntimeError("a peer is gone")


def prepare(order):
    """Stand in for `everstep.launch.prepare.main`, without torchtitan: the config consists of flags."""
    run_dir, flags = order["run_dir"], ["--fault_tolerance.groups", str(order["groups"]), *order["flags"]]
    (Path(run_dir) / "config.toml").write_text(f"flags = {json.dumps(flags)}")
    on_poison = "skip" if "--tiny.skip" in flags else "stop"
    ft = FaultTolerance(enable=True, stall_timeout_s=5.0, startup_timeout_s=60.0, on_poison=on_poison)
    steps = int(flag(flags, "--training.steps", "1000000"))
    found = Prepared(order["groups"], order["ranks"], seed=0, steps=steps, identity="tiny", fault_tolerance=ft)
    write_json(prepared_file(Path(run_dir)), asdict(found))
