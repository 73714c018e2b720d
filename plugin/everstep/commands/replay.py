"""`everstep replay`: compute a step of a run again, and compare its bits with those that were committed."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from everstep.config.source import read_source
from everstep.launch.prepare import Prepared, take_answer
from everstep.run.directory import LaunchError, config_file
from everstep.run.events import read_events
from everstep.run.files import read_json
from everstep.run.token import require_run

FOLDER = "replay"
"""Below the run directory: the run that computes the step again."""
NEVER = 1 << 40


@dataclass
class Told:
    """What the events of a run tell of one step.

    Attributes:
        sums: losses and gradient norms, by what was committed; one, unless groups or attempts differ.
        checksums: of the parameters after the step.
        bits: by slot and rank the checksum of the gradient, and by checksum the groups that have it.
    """

    sums: set[tuple[Any, Any]] = field(default_factory=set)
    checksums: set[str] = field(default_factory=set)
    bits: dict[tuple[int, int], dict[str, set[int]]] = field(default_factory=dict)


def replay(run_dir: tyro.conf.Positional[Path], step: int, slot: int | None = None) -> int:
    """Compute a step of a run again, in one group on this machine, from the newest checkpoint before it, and say of
    each slot whether the bits of its gradient are those that were committed. The run needs [fault_tolerance]
    exact = true; it may be finished or dead. RUN_DIR/replay keeps what was computed, until the next replay. Exit
    status 0: all that was recorded of the step has the bits that it has now.

    Args:
        run_dir: The run directory.
        step: The step.
        slot: Say this of one slot only. The whole step is computed all the same.
    """
    run_dir = run_dir.resolve()
    require_run(run_dir)
    begin, then = time.monotonic(), _told(run_dir)
    if step not in then:
        has = f"steps {min(then)} to {max(then)}" if then else "none"
        raise LaunchError(f"{run_dir} has no commit of step {step}: it has {has}.")
    start = _compute_again(run_dir, step)
    now = _told(run_dir / FOLDER)
    if step not in now:
        raise LaunchError(f"step {step} was not computed; see {run_dir / FOLDER}.log")
    took_s = time.monotonic() - begin
    source = f"checkpoint/step-{start}" if start else "the beginning"
    print(f"replayed   step {step} from {source}, {step - start} steps, {took_s:.0f} s")
    same = True
    for number in range(start + 1, step + 1):
        for line, equal in _compared(then.get(number, Told()), now[number], slot):
            if not equal or number == step:
                print(f"step {number:<6}{line}")
            same = same and equal
    return 0 if same else 1


def _compute_again(run_dir: Path, step: int) -> int:
    """Train one group up to a step, in `FOLDER`; the step of the checkpoint that it begins from, 0 for none."""
    from everstep.titan.same import checkpoints

    config, prepared = config_file(run_dir), take_answer(run_dir)
    if not isinstance(prepared, Prepared) or not prepared.fault_tolerance.exact:
        raise LaunchError(f"{run_dir} holds no run with [fault_tolerance] exact = true: its bits cannot be had again.")
    settings = read_source(config).table
    steps = settings["training"]["steps"]
    schedule = settings.get("lr_scheduler", {}).get("total_steps")
    a_commit = steps // prepared.steps  # a round's steps, in semi-synchronous training
    again, log = run_dir / FOLDER, run_dir / f"{FOLDER}.log"
    shutil.rmtree(again, ignore_errors=True)
    (again / "state").mkdir(parents=True)
    shutil.copy(run_dir / "state" / "exact.json", again / "state")  # the machine has to compute as the run's did
    start = max((found for found in checkpoints(run_dir) if found < step * a_commit), default=0)
    if start:
        (again / "checkpoint").mkdir()
        (again / "checkpoint" / f"step-{start}").symlink_to(run_dir / "checkpoint" / f"step-{start}")
    command = [sys.executable, "-m", "everstep.cli", "run", str(config), "--run-dir", str(again)]
    command += ["--groups", "1", "--ranks-per-group", str(prepared.ranks), "--steps", str(step * a_commit)]
    command += ["--lr_scheduler.total_steps", str(steps if schedule in (None, "None") else schedule)]
    command += ["--checkpoint.interval", str(NEVER), "--checkpoint.keep_latest_k", "0", "--snapshot.no-enable"]
    for key, value in (("audit_slots", 0), ("min_groups", 1), ("spares", 0)):
        command += [f"--fault_tolerance.{key}", str(value)]
    with log.open("wb") as output:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
    if done.returncode:
        why = read_json(again / "report.json").get("reason", "")
        raise LaunchError(f"step {step} was not computed: {why} (what was said: {log})")
    return start // a_commit


def _told(run_dir: Path) -> dict[int, Told]:
    """By step what the events say."""
    found: dict[int, Told] = {}
    for event in read_events(run_dir, {"commit", "slot_bits"}):
        told = found.setdefault(event["step"], Told())
        if event["kind"] == "commit":
            told.sums.add((event["loss"], event.get("grad_norm")))
        if event.get("checksum") is not None:
            told.checksums.add(event["checksum"])
        for slot, bits in event.get("bits", {}).items():
            told.bits.setdefault((int(slot), event["rank"]), {}).setdefault(bits, set()).add(event["group"])
    return found


def _compared(then: Told, now: Told, slot: int | None) -> Iterator[tuple[str, bool]]:
    """Sentences on one step, each with whether what it tells of is as it was."""
    if slot is None:
        yield _sentence("loss and gradient norm", then.sums, now.sums)
    for key in sorted(now.bits):
        if slot not in (None, key[0]):
            continue
        name = f"slot {key[0]}, rank {key[1]}"
        was = then.bits.get(key)
        if was is None:
            yield f"{name}: not recorded, its group died before it wrote that down", True
            continue
        wrong = {group for bits, groups in was.items() if bits not in now.bits[key] for group in groups}
        right = {group for groups in was.values() for group in groups} - wrong
        if right:
            yield f"{name}: the bits that group {_and(right)} committed", True
        if wrong:
            yield f"{name}: OTHER BITS than those that group {_and(wrong)} committed", False
    if slot is None:
        yield _sentence("parameters after it", then.checksums, now.checksums)


def _sentence(what: str, then: set, now: set) -> tuple[str, bool]:
    if not then:
        return f"{what}: not recorded", True
    return (f"{what}: the same bits", True) if then == now else (f"{what}: {then} then, {now} NOW", False)


def _and(groups: set[int]) -> str:
    return " and ".join(map(str, sorted(groups)))
