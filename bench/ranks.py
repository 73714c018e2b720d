"""Kill and stop single ranks of FSDP and tensor parallel groups at random moments of real training.

    python bench/ranks.py [--kills 150] [--stops 30] [--ranks 2] [--tensor-parallel 1] [--groups 2] [--run-dir DIR]

Starts `everstep run` on the demo's config with a smaller batch, and sends signals directly to its workers: SIGKILL, or
SIGSTOP for 1 to 12 s, to a random rank of a random group, whatever it is doing, as long as another group takes part.
When all groups are back, it stops the run, and compares it to a run of one group for as many steps without failures.
Prints one JSON object. The exit status is 1 if a step was lost, repeated or differs, if no group committed for longer
than stall_timeout_s, or if the watchdog ended a group that was not stopped. All of it runs on this machine.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from everstep.launch.prepare import PrepareOptions, prepare_in_subprocess
from everstep.report.score import broken_promises, score
from everstep.run.events import EventTail, read_events

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--training.seq_len", "64", "--training.local_batch_size", "1", "--training.global_batch_size", "8"]
PATIENCE_S = 300.0


@dataclass
class Group:
    """What the events say about a group, and what was done to it."""

    pids: list[int] = field(default_factory=list)
    trains: bool = False
    stopped_at: float = -1e9
    hit: bool = False
    """Whether one of its newest workers was killed."""


class Run:
    """One `everstep run`, followed by its events."""

    def __init__(self, args: argparse.Namespace, run_dir: Path, groups: int, steps: int) -> None:
        words = [sys.executable, "-m", "everstep.cli", "run", str(args.config), "--run-dir", str(run_dir)]
        words += ["--groups", str(groups), "--ranks-per-group", str(args.ranks)]
        words += ["--parallelism.tensor_parallel_degree", str(args.tensor_parallel), *SMALL]
        words += ["--lr_scheduler.total_steps", "1000000", "--steps", str(steps)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=env)
        self.groups = {number: Group() for number in range(groups)}
        self.step, self.progress, self.longest_s = 0, time.monotonic(), 0.0
        self.ended_unstopped: list[int] = []
        config = prepare_in_subprocess(PrepareOptions(str(args.config), here=False))
        self.stall_s = config.fault_tolerance.stall_timeout_s
        self._tail = EventTail(run_dir)

    def follow(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"the run ended by itself, with status {self.process.returncode}")
        for event in self._tail.new():
            group = self.groups.get(event.get("group", -1))
            if group is None:
                continue
            if event["kind"] == "workers_started":
                group.pids, group.trains, group.hit = event["pids"], False, False
            elif event["kind"] == "workers_died":
                group.trains = False
                if "stall" in str(event.get("reason")) and time.monotonic() - group.stopped_at > 2 * self.stall_s:
                    self.ended_unstopped.append(event["group"])
            elif event["kind"] == "commit":
                group.trains = not group.hit
                if event["step"] > self.step:
                    now = time.monotonic()
                    if self.step:
                        self.longest_s = max(self.longest_s, now - self.progress)
                    self.step, self.progress = event["step"], now

    def until_all_train(self) -> None:
        begun = time.monotonic()
        while not all(group.trains for group in self.groups.values()):
            self.follow()
            if time.monotonic() - begun > PATIENCE_S:
                raise SystemExit(f"not all groups take part after {PATIENCE_S:g} s")
            time.sleep(0.05)


def break_it(run: Run, kills: int, stops: int, every_s: float, draw: random.Random) -> None:
    """Make all kills and stops, in random order."""
    faults = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    draw.shuffle(faults)
    asleep: list[tuple[float, int]] = []
    due = time.monotonic()
    while faults or asleep:
        run.follow()
        now = time.monotonic()
        for entry in [entry for entry in asleep if entry[0] < now]:
            asleep.remove(entry)
            with contextlib.suppress(ProcessLookupError):
                os.kill(entry[1], signal.SIGCONT)
        able = [group for group in run.groups.values() if group.trains]
        if not faults or now < due or not able:
            time.sleep(0.005)
            continue
        # If several groups take part, hit one of them. If only one does, sometimes hit a group that is coming back.
        may = able if len(able) > 1 else [g for g in run.groups.values() if g not in able and g.pids and not g.hit]
        due = now + draw.uniform(0.2, 2 * every_s)
        if not may or (len(able) == 1 and draw.random() < 0.7):
            continue
        group = draw.choice(may)
        pid = draw.choice(group.pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, faults[-1])
            if faults.pop() == signal.SIGKILL:
                group.trains, group.hit = False, True
            else:
                group.stopped_at = now
                asleep.append((now + draw.uniform(1, 12), pid))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=150)
    parser.add_argument("--stops", type=int, default=30)
    parser.add_argument("--every", type=float, default=2.0, help="mean seconds between hits")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.toml")
    parser.add_argument("--run-dir", type=Path, help="a folder to keep; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = (args.run_dir or Path(folder) / "run").resolve()
        reference = run_dir.with_name(run_dir.name + "-reference")
        run = Run(args, run_dir, args.groups, 1_000_000)
        try:
            run.until_all_train()
            begun = time.monotonic()
            break_it(run, args.kills, args.stops, args.every, random.Random(args.seed))
            run.until_all_train()
            took_s = time.monotonic() - begun
            run.process.send_signal(signal.SIGINT)
            run.process.wait(PATIENCE_S)
        finally:
            if run.process.poll() is None:
                run.process.terminate()
        steps = max(event["step"] for event in read_events(run_dir) if event["kind"] == "commit")
        again = Run(args, reference, 1, steps)
        again.process.wait()
        found = score(run_dir, reference)
        broken = broken_promises(found)
        if run.longest_s > run.stall_s:
            broken.append(f"no group committed for {run.longest_s:.1f} s")
        if run.ended_unstopped:
            broken.append(f"the watchdog ended groups {run.ended_unstopped}, which were not stopped")
        fields = "steps attempts attempts_thrown_away samples_lost samples_repeated replicas_diverged loss_delta_max "
        fields += "loss_delta_steps deaths_unprovoked groups_mean"
        result = {
            "groups": args.groups,
            "ranks": args.ranks,
            "tensor_parallel": args.tensor_parallel,
            "kills": args.kills,
            "stops": args.stops,
            "took_s": round(took_s),
            "longest_without_commit_s": round(run.longest_s, 1),
            **{name: found.get(name) for name in fields.split()},
            "broken": broken,
        }
        print(json.dumps(result, indent=2))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
