"""Runs torchtitan's recipes with replica groups on a CPU, kills one rank in mid-step, and compares the losses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import catalog
from everstep.run.events import read_events
from forked import ran
from watched import environment

HERE = Path(__file__).parent
LONGEST_S = 1200.0
"""For a run, on however slow a machine: then it loops."""


def _run(config, groups, ranks, folder, entry, kill=""):
    """A run, in the recipes' folder with their assets: how it was refused, or what went wrong."""
    place = config.parent.parent
    shutil.rmtree(folder / "events", ignore_errors=True)
    for left in ("config.toml", "state/finished.json"):
        (folder / left).unlink(missing_ok=True)
    env = environment(HF_HUB_OFFLINE="1", HF_HOME=str(place / "hf"), EVERSTEP_TEST_KILL=kill)
    env |= {"RUNNER_TEMP": str(place)}  # where torchtitan's recipe looks for catalog.HF_CHECKPOINT
    words = [sys.executable, *map(str, (HERE / "mid_step_kill.py", config, groups, ranks, folder, entry))]
    try:
        done = ran(words, env=env, cwd=place, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return "", f"it had not ended after {LONGEST_S:g} s"
    refused = [line.removeprefix("refused: ") for line in done.stdout.splitlines() if line.startswith("refused: ")]
    if refused:
        return refused[0].replace(f"{config.parent}/", ""), ""
    return "", "" if done.returncode == 0 else _why(folder) or f"ended with status {done.returncode}"


def _in_groups(recipe, folder, steps, kill):
    """How a run in groups was refused, or what went wrong."""
    config = folder / f"{recipe.name}.toml"
    config.write_text(recipe.toml(fault_tolerant=True, steps=steps))
    return _run(config, recipe.groups, recipe.ranks, folder / "run", "mid_step_kill:main", kill)


def survive(recipe, folder):
    """The recipe in groups, with a kill: its losses by step; how it was refused; what went wrong."""
    if first := catalog.FIRST_RUN.get(recipe.name):
        refused, failed = _in_groups(catalog.load(recipe.suite, first), folder, catalog.HALF_WAY, "")
        if refused or failed:
            return {}, refused, failed and f"the run that it loads failed: {failed}"
        if (written := folder / "run" / "hf_checkpoint" / f"step-{catalog.HALF_WAY}").exists():
            shutil.copytree(written, folder.parent / catalog.HF_CHECKPOINT, dirs_exist_ok=True)
    refused, failed = _in_groups(recipe, folder, catalog.STEPS, f"{recipe.groups - 1}/{recipe.ranks - 1}")
    if refused or failed:
        return {}, refused, failed
    events = list(read_events(folder / "run"))
    commits = [e for e in events if e["kind"] == "commit" and not e.get("rank")]
    if not all(e["coverage_ok"] for e in commits):
        return {}, "", "a slot was missing or twice in a step"
    killed = [e for e in events if e["kind"] == "workers_died" and "SIGKILL" in e.get("reason", "")]
    healed = [e for e in events if e["kind"] == "heal" and e["group"] == recipe.groups - 1]
    if not killed or not healed:
        return {}, "", "nobody was killed" if not killed else "who was killed did not heal"
    return {str(e["step"]): e["loss"] for e in commits}, "", ""


def _why(folder):
    """The error in the workers' logs; empty if there is none."""
    from_log = sorted((folder / "run" / "logs").glob("group-*/rank-*.log"), key=lambda path: path.stat().st_mtime)
    for log in from_log:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line and "rror: " in line]
        if lines:
            return lines[-1].strip()[:400]
    return ""


def alone(recipe, folder):
    """What torchtitan's own trainer makes of it: {step: loss}, and the error if there is one."""
    first = catalog.FIRST_RUN.get(recipe.name)
    if first and "hf_" not in first:  # whose checkpoint is where the groups' run left it
        _, error = _alone(catalog.load(recipe.suite, first), folder, catalog.HALF_WAY)
        if error:
            return {}, error
    return _alone(recipe, folder, catalog.STEPS)


def _alone(recipe, folder, steps):
    config, place = folder / f"alone-{recipe.name}.toml", folder / "alone"
    config.write_text(recipe.toml(fault_tolerant=False, steps=steps))
    refused, failed = _run(config, 1, recipe.ranks * recipe.replicas, place, "alone:main")
    if refused or failed:
        return {}, refused or failed
    return json.loads((place / "losses.json").read_text()), ""


def compare(recipe, folder):
    """What comes of a recipe: result, why, and the largest difference between the losses of both runs."""
    losses, refused, failed = survive(recipe, folder)
    if refused or failed:
        return {"result": "refused" if refused else "fails", "why": refused or failed}
    theirs, error = alone(recipe, folder)
    if error:
        return {"result": "fails", "why": f"torchtitan alone: {error}"}
    steps = {int(step) for step in losses}
    delta = max(abs(theirs.get(step, float("inf")) - loss) for step, loss in losses.items())
    why = "" if delta <= recipe.tolerance else f"losses differ by {delta:.1g}"
    if max(steps) != catalog.STEPS:
        why = f"it ended at step {max(steps)}"
    return {"delta": delta, "result": "fails" if why else "passes", "why": why}
