"""Comparing bits: `everstep same`, of two runs; `everstep replay`, of a step that is computed again."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from everstep.config.source import read_source
from everstep.launch.prepare import SECRET, require_prepared
from everstep.run.directory import LaunchError, config_file, exact_file, loaded_file, require_events
from everstep.run.events import read_events
from everstep.run.files import read_json, write_whole
from everstep.run.token import require_own, require_run

FOLDER = "replay"
"""Folder in the run directory for the run that computes the step again."""
NEVER = 1 << 40


def same(run_a: tyro.conf.Positional[Path], run_b: tyro.conf.Positional[Path]) -> int:
    """Compare two runs bit by bit: the losses, gradient norms and checksums of each step, and all tensors of the newest
    checkpoint that both have. With [fault_tolerance] exact = true two runs of one config have the same bits, whatever
    failed. Exit status: 0 if they have a step in common and all that both have is the same, else 1.

    Args:
        run_a: The directory of a run.
        run_b: The directory of the other run.
    """
    from everstep.titan.same import compare

    for run_dir in (run_a, run_b):  # it only reads, so copies without token and config.toml will do
        require_events(run_dir)
        require_own(run_dir)
    try:
        found = compare(run_a, run_b)
    except (OSError, ValueError) as error:
        raise LaunchError(str(error)) from None
    print(f"steps      {found.steps} in both runs, {found.checksums} with a checksum of the parameters")
    if found.steps or found.diverged:
        print(f"           they diverge at {found.diverged}" if found.diverged else "           the same bits")
    if found.checkpoint:
        print(f"checkpoint after step {found.checkpoint}, {found.tensors} tensors compared")
        print(f"           {found.differing or 'the same bits'}")
    else:
        print("checkpoint none of a step that both runs have")
    return 0 if found.same else 1


@dataclass
class Told:
    """What the events of a run say of one step.

    Attributes:
        sums: Pairs of loss and gradient norm that were committed: one, unless groups or attempts differ.
        checksums: Checksums of the parameters after the step.
        bits: (slot, rank) -> checksum of the gradient -> the groups that computed it.
    """

    sums: set[tuple[Any, Any]] = field(default_factory=set)
    checksums: set[str] = field(default_factory=set)
    bits: dict[tuple[int, int], dict[str, set[int]]] = field(default_factory=dict)


def replay(run_dir: tyro.conf.Positional[Path], step: int, slot: int | None = None) -> int:
    """Compute a step of a run again, in one group on this machine, from the newest checkpoint before it. Say for each
    slot whether its gradient has the bits that were committed. The run needs [fault_tolerance] exact = true; it may
    have ended or died. RUN_DIR/replay keeps what was computed, until the next replay. Exit status: 0 if all bits that
    were recorded, from the checkpoint to this step, are the same now, else 1.

    Args:
        run_dir: The run directory.
        step: Number of the step.
        slot: Compare this slot only. The whole step is computed nevertheless.
    """
    run_dir = run_dir.resolve()
    require_run(run_dir)
    begin = time.monotonic()
    slots = {event["step"]: len(event.get("owners") or ()) for event in read_events(run_dir, {"commit"})}
    if step not in slots:
        has = f"steps {min(slots)} to {max(slots)}" if slots else "none"
        raise LaunchError(f"{run_dir} has no commit of step {step}: it has {has}.")
    semi = read_source(config_file(run_dir)).table.get("semi_sync", {}) if slot is not None else {}
    if semi.get("method", "none") != "none":
        raise LaunchError("--slot: a semi-synchronous run has no gradients of slots to compare. Replay the whole step.")
    if slot is not None and slot not in range(slots[step]):
        raise LaunchError(f"step {step} has no slot {slot}: it has {slots[step]}, counted from 0.")
    start = _compute_again(run_dir, step)
    steps = range(start + 1, step + 1)
    then, now = told_of(run_dir, steps), told_of(run_dir / FOLDER, steps)
    if step not in now:
        raise LaunchError(f"step {step} was not computed; see {run_dir / FOLDER}.log")
    if slot is not None and slot not in {number for number, _ in now[step].bits}:
        raise LaunchError(f"step {step} has no slot {slot} whose gradient could be compared.")
    took_s = time.monotonic() - begin
    source = f"checkpoint/step-{start}" if start else "the beginning"
    print(f"replayed   step {step} from {source}, {step - start} steps, {took_s:.0f} s")
    same = True
    for number in steps:
        for line, equal in _compared(then.get(number, Told()), now[number], slot):
            if not equal or number == step:
                print(f"step {number:<6}{line}")
            same = same and equal
    return 0 if same else 1


def _compute_again(run_dir: Path, step: int) -> int:
    """Train one group up to a step, in `FOLDER`. Return the step of the checkpoint that it starts from, 0 for none."""
    from everstep.titan.parts import has_model_only
    from everstep.titan.same import checkpoints

    config, prepared = config_file(run_dir), require_prepared(run_dir)
    if not prepared.fault_tolerance.exact:
        raise LaunchError(f"{run_dir} holds no run with [fault_tolerance] exact = true: its bits cannot be reproduced.")
    settings = read_source(config).table
    steps = settings["training"]["steps"]
    schedule = settings.get("lr_scheduler", {}).get("total_steps")
    a_commit = steps // prepared.steps  # inner steps of a round if semi-synchronous, else 1
    again, log = run_dir / FOLDER, run_dir / f"{FOLDER}.log"
    shutil.rmtree(again, ignore_errors=True)
    (again / "state").mkdir(parents=True)
    shutil.copy(exact_file(run_dir), again / "state")  # a machine that computes other bits is refused
    found = checkpoints(run_dir)
    whole = (inner for inner, folder in found.items() if not has_model_only(folder))
    start = max((inner for inner in whole if inner < step * a_commit), default=0)
    if start:
        (again / "checkpoint").mkdir()
        (again / "checkpoint" / f"step-{start}").symlink_to(found[start].resolve())
    if (read_json(loaded_file(run_dir)).get("from") or 0) != start:  # what loading leaves out was left out there
        text = re.sub(r"(?m)^(exclude_from_loading = ).*$", r"\1[]", config.read_text())
        config = run_dir / f"{FOLDER}.toml"
        write_whole(config, re.sub(r"(?m)^(load_step = ).*$", r"\1-1", text).encode(), mode=SECRET)
    command = [sys.executable, "-m", "everstep.cli", "run", str(config), "--run-dir", str(again)]
    command += ["--groups", "1", "--ranks-per-group", str(prepared.ranks), "--steps", str(step * a_commit)]
    command += ["--lr_scheduler.total_steps", str(steps if schedule in (None, "None") else schedule)]
    if settings.get("semi_sync", {}).get("method", "none") != "none":  # workers = 0 means as many as there were groups
        command += ["--semi_sync.workers", str(settings["semi_sync"]["workers"] or prepared.groups)]
    command += ["--checkpoint.folder", "checkpoint", "--checkpoint.interval", str(NEVER)]
    command += ["--checkpoint.keep_latest_k", "0", "--snapshot.no-enable"]
    for key, value in (("audit_slots", 0), ("min_groups", 1), ("spares", 0), ("metrics_port", 0), ("notify", "")):
        command += [f"--fault_tolerance.{key}", str(value)]
    with log.open("wb") as output:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
    if done.returncode:
        why = read_json(again / "report.json").get("reason", "")
        raise LaunchError(f"step {step} was not computed: {why} (see {log})")
    return start // a_commit


def told_of(run_dir: Path, steps: Container[int]) -> dict[int, Told]:
    """Return step -> what the events say of it, of these steps only: all steps of a long run take gigabytes."""
    found: dict[int, Told] = {}
    for event in read_events(run_dir, {"commit", "slot_bits"}):
        if event["step"] not in steps:
            continue
        told = found.setdefault(event["step"], Told())
        if event["kind"] == "commit":
            told.sums.add((event["loss"], event.get("grad_norm")))
        if event.get("checksum") is not None:
            told.checksums.add(event["checksum"])
        for slot, bits in event.get("bits", {}).items():
            told.bits.setdefault((int(slot), event["rank"]), {}).setdefault(bits, set()).add(event["group"])
    return found


def _compared(then: Told, now: Told, slot: int | None) -> Iterator[tuple[str, bool]]:
    """Yield sentences on one step, each with whether the bits that it is about are the same."""
    if slot is None:
        yield _sentence("loss and gradient norm", then.sums, now.sums)
    for key in sorted(now.bits):
        if slot not in (None, key[0]):
            continue
        name = f"slot {key[0]}, rank {key[1]}"
        was = then.bits.get(key)
        if was is None:
            yield f"{name}: not recorded, as its group died before its event", True
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
