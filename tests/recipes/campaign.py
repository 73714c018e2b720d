"""Runs torchtitan's recipes with replica groups on a CPU, kills one rank in mid-step, and compares the losses.

    python tests/recipes/campaign.py [TEXT ...] [--keep FOLDER]

TEXT: only recipes whose name has one of these in it. Prints a line for each: what docs/recipes.md tells.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import catalog  # noqa: E402
from assets import write_assets  # noqa: E402
from everstep.run.events import read_events  # noqa: E402


class Server:
    """`recipe_server.py`, started with the first question."""

    def __init__(self, log):
        self._log, self._process = log, None

    def ask(self, **request):
        if self._process is None:
            paths = os.pathsep.join([str(HERE), *sys.path])
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "recipe_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.open("ab"),
                text=True,
                env=os.environ
                | {
                    "PYTHONPATH": paths,
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "RUNNER_TEMP": str(self._log.parent),  # where torchtitan's recipe looks for catalog.HF_CHECKPOINT
                    "HF_HOME": str(self._log.parent / "hf"),
                },
                cwd=self._log.parent,
            )
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()


def _in_groups(server, recipe, folder, steps, kill):
    config = folder / f"{recipe.name}.toml"
    config.write_text(recipe.toml(fault_tolerant=True, steps=steps))
    run = str(folder / "run")
    return server.ask(
        kind="groups", config=str(config), ranks=recipe.ranks, groups=recipe.groups, folder=run, kill=kill
    )


def survive(server, recipe, folder):
    """The recipe in groups, with a kill: its losses by step; how it was refused; what went wrong."""
    kill = f"{recipe.groups - 1}/{recipe.ranks - 1}"
    if first := catalog.FIRST_RUN.get(recipe.name):
        before = _in_groups(
            server,
            catalog.Recipe(**server.ask(kind="recipe", suite=recipe.suite, name=first)),
            folder,
            catalog.HALF_WAY,
            "",
        )
        if before.get("status") != 0:
            return {}, before.get("refused", ""), f"the run that it loads failed: {_why(before, folder)}"
        shutil.rmtree(folder / "run" / "events")
        if (written := folder / "run" / "hf_checkpoint" / f"step-{catalog.HALF_WAY}").exists():
            shutil.copytree(written, folder.parent / catalog.HF_CHECKPOINT, dirs_exist_ok=True)
        (folder / "run" / "config.toml").unlink()
        (folder / "run" / "state" / "finished.json").unlink()
    answer = _in_groups(server, recipe, folder, catalog.STEPS, kill)
    if "refused" in answer:
        return {}, answer["refused"].replace(f"{folder}/", ""), ""
    if answer.get("status") != 0:
        return {}, "", _why(answer, folder)
    events = list(read_events(folder / "run"))
    commits = [e for e in events if e["kind"] == "commit" and not e.get("rank")]
    if not all(e["coverage_ok"] for e in commits):
        return {}, "", "a slot was missing or twice in a step"
    killed = [e for e in events if e["kind"] == "workers_died" and "SIGKILL" in e.get("reason", "")]
    healed = [e for e in events if e["kind"] == "heal" and e["group"] == recipe.groups - 1]
    if not killed or not healed:
        return {}, "", "nobody was killed" if not killed else "who was killed did not heal"
    return {str(e["step"]): e["loss"] for e in commits}, "", ""


def _why(answer, folder):
    """The error that a run in groups ended with."""
    from_log = sorted((folder / "run" / "logs").glob("group-*/rank-*.log"), key=lambda path: path.stat().st_mtime)
    for log in from_log:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line and "rror: " in line]
        if lines:
            return lines[-1].strip()[:400]
    return answer.get("error") or f"ended with status {answer.get('status')}"


def alone(server, recipe, folder):
    """What torchtitan's own trainer makes of it: {losses} or {error}."""
    first = catalog.FIRST_RUN.get(recipe.name)
    if first and "hf_" not in first:  # whose checkpoint is where the groups' run left it
        before = catalog.Recipe(**server.ask(kind="recipe", suite=recipe.suite, name=first))
        found = _alone(server, before, folder, catalog.HALF_WAY)
        if "error" in found:
            return found
    return _alone(server, recipe, folder, catalog.STEPS)


def _alone(server, recipe, folder, steps):
    config, place = folder / f"alone-{recipe.name}.toml", folder / "alone"
    config.write_text(recipe.toml(fault_tolerant=False, steps=steps))
    place.mkdir(exist_ok=True)
    return server.ask(kind="alone", config=str(config), ranks=recipe.ranks * recipe.replicas, folder=str(place))


def compare(server, recipe, folder):
    """What comes of a recipe: result, why, and the largest difference between the losses of both runs."""
    begun = time.monotonic()
    losses, refused, failed = survive(server, recipe, folder)
    found = {"result": "refused" if refused else "fails", "why": refused or failed}
    theirs = {"losses": {}} if refused or failed else alone(server, recipe, folder)
    found["took_s"] = round(time.monotonic() - begun, 1)
    if found["why"]:
        return found
    if "error" in theirs:
        return found | {"why": f"torchtitan alone: {theirs['error']}"}
    steps = {int(step) for step in losses}
    delta = max(abs(theirs["losses"].get(step, float("inf")) - loss) for step, loss in losses.items())
    why = "" if delta <= recipe.tolerance else f"losses differ by {delta:.1g}"
    if max(steps) != catalog.STEPS:
        why = f"it ended at step {max(steps)}"
    return found | {"delta": delta, "result": "fails" if why else "passes", "why": why}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("only", nargs="*", default=[])
    parser.add_argument("--keep", type=Path, help="keep what runs wrote in this folder")
    options = parser.parse_args()
    scratch = options.keep or Path(tempfile.mkdtemp(prefix="recipes-"))
    scratch.mkdir(exist_ok=True, parents=True)
    write_assets(scratch)
    server = Server(scratch / "server.log")
    for key in server.ask(kind="names"):
        if options.only and not any(text in key for text in options.only):
            continue
        suite, _, name = key.partition(".")
        recipe = catalog.Recipe(**server.ask(kind="recipe", suite=suite, name=name))
        folder = scratch / name
        folder.mkdir()
        found = compare(server, recipe, folder)
        print(f"{key}: {found['result']} {found['why'][:400]} {found.get('delta', '')} {found['took_s']} s", flush=True)
    server.end()
    if options.keep is None:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
