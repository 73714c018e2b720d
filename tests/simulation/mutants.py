"""Changes of one line in the protocol, and the first seed whose run each of them spoils.

    PYTHONPATH=plugin:tests python -m simulation.mutants [--most 5000] [--jobs 2] [NUMBER …]

Each is made by text replacement in a copy of the package, so that a change which no longer fits the source is an
error. Prints a Markdown table, which docs/simulation.md holds.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHUNK = 50


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` becomes `new` in a file of `everstep/step`, where it is there once."""

    what: str
    file: str
    old: str
    new: str
    kinds: str = ""
    """Kinds of faults that bring it out, with commas between; all where it is empty."""

    def apply(self, package: Path) -> None:
        path = package / "step" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"'{self.what}': its text is {text.count(self.old)} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new))


MUTANTS = (
    Mutant(
        "a rank that has its gradients goes on alone",
        "protocol.py",
        "        if summed and sound:\n",
        "        if not error and sound:\n",
    ),
    Mutant(
        "each rank decides by itself whether the rows came",
        "protocol.py",
        "if not self.decisions.all_true(point, bool(met)):",
        'if not (met if point == "rows" else self.decisions.all_true(point, bool(met))):',
    ),
    Mutant(
        "each rank decides by itself whether it is connected",
        "protocol.py",
        "if not self.decisions.all_true(point, bool(met)):",
        'if not (met if point == "connect" else self.decisions.all_true(point, bool(met))):',
    ),
    Mutant(
        "each rank votes for itself",
        "protocol.py",
        "if not all(yes for yes, _ in votes) or len({digest for _, digest in votes}) > 1:",
        "if error:",
    ),
    Mutant(
        "what is held outlives a commit",
        "protocol.py",
        "        self._let_go(step + 1, history)\n        self._tries",
        "        self._tries",
    ),
    Mutant(
        "dropped slots stay in the gradients",
        "protocol.py",
        "        self._held.slots.clear()\n        self._work.discard()\n\n    def _gather_doors",
        "        self._held.slots.clear()\n\n    def _gather_doors",
    ),
    Mutant(
        "the plan's drops are not heeded",
        "protocol.py",
        "if self._group in attempt.plan.drops:",
        "if False:",
        kinds="beats,cut,lose,stop,lh-freeze",
    ),
    Mutant(
        "the door stays open while the state changes",
        "protocol.py",
        "        self._door.close()\n        self._work.apply(commit)",
        "        self._work.apply(commit)",
    ),
    Mutant(
        "an audit's finding is not remembered", "protocol.py", "            self._suspect = True\n", "", kinds="flip"
    ),
    Mutant(
        "a commit is followed without keeping it",
        "protocol.py",
        "            self._healing.commits.append((commit, self._reducer.stash()))",
        "            pass",
        kinds="kill,join",
    ),
    Mutant(
        "commits are kept and not applied",
        "protocol.py",
        "            self._reducer.unstash(sums)\n            self.apply(commit)",
        "            self._reducer.unstash(sums)",
        kinds="kill,join",
    ),
    Mutant("requests are not numbered", "protocol.py", "        self._asked += 1\n", ""),
    Mutant(
        "a broken process group counts as connected",
        "protocol.py",
        '        self._sums.abort()\n        self._connected = ""',
        "        self._sums.abort()",
    ),
    Mutant(
        "the process group is not broken when an attempt fails",
        "protocol.py",
        '        self._sums.abort()\n        self._connected = ""',
        '        self._connected = ""',
    ),
    Mutant(
        "what was computed is not written down",
        "protocol.py",
        "        self._held.slots.update(computed)\n",
        "",
    ),
    Mutant(
        "a refused slot stays in the gradients",
        "protocol.py",
        "                self._held.refused[slot] += 1\n",
        "                self._held.refused[slot] += 1\n                self._reducer.end_slot()\n",
        kinds="refuse",
    ),
    Mutant(
        "slots that ended stay apart from what was held",
        "protocol.py",
        "        self._reducer.end_slots()\n",
        "",
        kinds="refuse",
    ),
    Mutant(
        "a commit's parent is the group's own state", "protocol.py", "parent=quorum.history,", "parent=self.history,"
    ),
    Mutant("every sum counts as whole", "protocol.py", "once=all(count == 1 for count in tally.coverage)", "once=True"),
    Mutant(
        "an older start of a group goes on",
        "protocol.py",
        "        if any(rank.fenced for rank in ranks):\n",
        "        if False:\n",
        kinds="twin,kill",
    ),
    Mutant(
        "a gradient that is not finite is summed",
        "protocol.py",
        "        if summed and sound:\n",
        "        if summed:\n",
        kinds="nan",
    ),
    Mutant(
        "a slot that is there twice passes",
        "ledger.py",
        "    if twice:\n",
        "    if False:\n",
        kinds="beats,cut,lose,stop,lh-freeze",
    ),
    Mutant("a slot that is missing passes", "ledger.py", "if missing and (", "if False and ("),
    Mutant(
        "nobody drops what another holds as well", "ledger.py", "            drops.add(row.group)", "            pass"
    ),
    Mutant(
        "a history knows no quorum",
        "ledger.py",
        'text = f"{history}/{step}/{key}".encode()',
        'text = f"{history}/{step}".encode()',
    ),
    Mutant(
        "rows of another history are summed over",
        "ledger.py",
        "    for row in computing:\n",
        "    for row in ():\n",
        kinds="lh-double,lh-move,lh-freeze,cut",
    ),
    Mutant(
        "the least common checksum is believed",
        "ledger.py",
        "kept = max(voters, key=",
        "kept = min(voters, key=",
        kinds="flip,heal,stray,nan,refuse,beats",
    ),
    Mutant(
        "states of any history count",
        "quorum.py",
        "able = tuple(member.group for member in newest if member.history == history)",
        "able = tuple(member.group for member in newest)",
        kinds="lh-double,lh-move,lh-freeze,cut",
    ),
    Mutant(
        "the oldest state counts",
        "quorum.py",
        "    step = max(member.step for member in trusted)",
        "    step = min(member.step for member in trusted)",
    ),
    Mutant(
        "a key forgets the request's number",
        "quorum.py",
        "{member.group}:{member.life}:{member.number}",
        "{member.group}:{member.life}",
    ),
    Mutant(
        "states that an audit named count as any",
        "quorum.py",
        "trusted = [member for member in having if not member.suspect] or having",
        "trusted = having",
        kinds="flip,kill",
    ),
    Mutant(
        "a group restores though another has a state",
        "driver.py",
        "        if all(alone for _, alone in said):",
        "        if True:",
    ),
    Mutant(
        "a group that is asked to leave stays",
        "driver.py",
        "                        break\n                    if self._protocol.leaving:",
        "                        break\n                    if False:",
        kinds="leave",
    ),
    Mutant(
        "the last state is written by whoever comes first",
        "driver.py",
        "if quorum.able[0] == self._group and not saved:",
        "if quorum.groups[0] == self._group and not saved:",
    ),
    Mutant(
        "a step is made though others have ended the run",
        "protocol.py",
        "        if quorum.is_finishing():",
        "        if False:",
    ),
    Mutant(
        "who comes after the end goes on",
        "protocol.py",
        "if finished == self._finished_before or not NO_STATE < self.step < finished:",
        "if True:",
    ),
    Mutant(
        "each column's snapshots decide about the step",
        "ledger.py",
        "        whole = (self.coverage, self.owners, self.leaving, self.exhausted)",
        "        whole = (self.coverage, self.owners, self.leaving, self.exhausted, self.snapshots)",
    ),
    Mutant(
        "a group that cannot compute gives its slots all the same",
        "protocol.py",
        "        else:\n            self._drop()\n        if self._group in quorum.sources:",
        "        if self._group in quorum.sources:",
    ),
    Mutant(
        "nobody says that the last state is saved",
        "driver.py",
        "                self._files.mark_finished(step, for_all=not some_leave)\n",
        "",
    ),
    Mutant(
        "a refused slot is anybody's",
        "ledger.py",
        "        standing = 2 if slot in row.disputed else 0 if slot in row.refused else 1\n",
        "        standing = 0\n",
        kinds="sick,kill",
    ),
    Mutant(
        "a slot that was refused twice counts as refused once",
        "protocol.py",
        "if times >= ledger.WITNESS_AFTER",
        "if times > 999",
        kinds="sick,kill",
    ),
    Mutant(
        "each rank decides by itself whether it heard the witnesses",
        "protocol.py",
        "if not self.decisions.all_true(point, bool(met)):",
        'if not (met if point == "witnesses" else self.decisions.all_true(point, bool(met))):',
        kinds="sick,narrow,refuse,lose,cut",
    ),
    Mutant(
        "each rank decides by itself which groups ended",
        "protocol.py",
        "for _, *words in said))\n        ended",
        "for _, *words in said[self.decisions.rank : self.decisions.rank + 1]))\n        ended",
    ),
)

SEARCH = """
import sys
from simulation.world import Settings, simulate
settings = Settings(kinds=tuple(sys.argv[3].split(","))) if sys.argv[3] else Settings()
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    outcome = simulate(seed, settings)
    if outcome.violations:
        print(seed, "|", outcome.violations[0].kind, flush=True)
        break
"""


def search(package_root: Path, most: int, kinds: str) -> tuple[int, str] | None:
    """The first seed that breaks the promise with this package, and how."""
    environment = {**os.environ, "PYTHONPATH": f"{package_root}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    for first in range(0, most, CHUNK):
        command = [sys.executable, "-c", SEARCH, str(first), str(min(most, first + CHUNK)), kinds]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return first, "crash: " + done.stderr.strip().splitlines()[-1]
        if done.stdout.strip():
            seed, _, kind = done.stdout.strip().partition(" | ")
            return int(seed), kind
    return None


def try_mutant(mutant: Mutant, most: int) -> tuple[int, str] | None:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "everstep"
        shutil.copytree(ROOT / "plugin" / "everstep", package, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.apply(package)
        return search(Path(folder), most, mutant.kinds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="which; default: all")
    parser.add_argument("--most", type=int, default=5000, help="seeds to try for each")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = options.numbers or range(1, len(MUTANTS) + 1)
    print("| # | change | file | faults | first seed | seen as |\n|---|---|---|---|---|---|", flush=True)
    missed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        found = {pool.submit(try_mutant, MUTANTS[number - 1], options.most): number for number in chosen}
        for result in as_completed(found):
            number = found[result]
            seed, kind = result.result() or ("none", "")
            missed += seed == "none"
            mutant = MUTANTS[number - 1]
            print(
                f"| {number} | {mutant.what} | {mutant.file} | {mutant.kinds or 'all'} | {seed} | {kind} |", flush=True
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
